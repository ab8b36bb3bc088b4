// Filters of the ledger. Without script the whole table is there and the form stays hidden.
const form = document.getElementById("ledger-filters");
if (form) {
  const rows = [...document.querySelectorAll("#ledger-table tbody tr")];
  const selects = [...form.querySelectorAll("select")];
  const count = document.getElementById("ledger-count");
  const apply = () => {
    let shown = 0;
    for (const row of rows) {
      row.hidden = selects.some((select) => select.value && row.dataset[select.dataset.filter] !== select.value);
      shown += !row.hidden;
    }
    count.textContent = `${shown} of ${rows.length} statements`;
  };
  form.hidden = false;
  form.addEventListener("change", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  // A permanent link into a filtered table must always find its row.
  window.addEventListener("hashchange", () => { selects.forEach((select) => { select.value = ""; }); apply(); });
  apply();
}
// Folded parts print open.
window.addEventListener("beforeprint", () => {
  document.querySelectorAll("details:not([open])").forEach((part) => { part.open = true; });
});
