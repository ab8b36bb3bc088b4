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
// The claims map: pointing at a statement shows all it rests on and all that rests on it. Without script the lines are there.
const map = document.getElementById("claims-map");
if (map) {
  const lines = [...map.querySelectorAll(".map-edges path")];
  const walk = (id, from, to, ids, found) => {
    for (const line of lines) {
      if (line.dataset[from] !== id) continue;
      found.add(line);
      if (!ids.has(line.dataset[to])) { ids.add(line.dataset[to]); walk(line.dataset[to], from, to, ids, found); }
    }
  };
  const clear = () => {
    map.classList.remove("tracing");
    map.querySelectorAll(".related").forEach((part) => part.classList.remove("related"));
  };
  const trace = (node) => {
    clear();
    const ids = new Set([node.dataset.id]), found = new Set();
    walk(node.dataset.id, "to", "from", ids, found);
    walk(node.dataset.id, "from", "to", ids, found);
    map.classList.add("tracing");
    found.forEach((line) => line.classList.add("related"));
    map.querySelectorAll(".map-node").forEach((other) => other.classList.toggle("related", ids.has(other.dataset.id)));
  };
  map.querySelectorAll(".map-node").forEach((node) => {
    node.addEventListener("pointerenter", () => trace(node));
    node.addEventListener("focus", () => trace(node));
    node.addEventListener("pointerleave", clear);
    node.addEventListener("blur", clear);
  });
}
// Folded parts print open.
window.addEventListener("beforeprint", () => {
  document.querySelectorAll("details:not([open])").forEach((part) => { part.open = true; });
  window.dispatchEvent(new Event("resize"));
});
// An opened fold is narrower than a closed one: the theme must look again which listings scroll and need a tab stop.
document.addEventListener("click", (event) => {
  if (event.target.closest("summary, .toggle-button, .admonition-title")) window.dispatchEvent(new Event("resize"));
});
