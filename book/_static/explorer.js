// The explorer: sliders look values up in tables that were computed when the site was built. Without script the tables are there.
const tables = JSON.parse(document.getElementById("explorer-tables").textContent);

const binomial = (n, k) => { let b = 1; for (let i = 1; i <= k; i++) b = (b * (n - k + i)) / i; return Math.round(b); };
const number = (x) => (x >= 1e6 ? x.toExponential(1) : x >= 100 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(3))));

// For each part of the page: from slider positions to the values shown.
const look = {
  attention({ stops, logit, degree }, at) {
    const L = stops.L[at.L], d = stops.d[at.d];
    const bound = logit[at.d][at.B][at.scale], g = degree[at.d][at.B][at.scale][at.tolerance];
    const shown = { logit: number(bound), share: number(bound / Math.log(L)) };
    if (g === null) return { ...shown, degree: "beyond the table", features: "–", break: "–", verdict: "exact attention: the logits are too large" };
    const features = binomial(d + g, g), length = 2 * features;
    return {
      ...shown, degree: String(g), features: number(features), break: number(length),
      verdict: L > length ? `about ${number(L / length)} times fewer evaluations than exact attention` : "exact attention is cheaper",
    };
  },
  depth: ({ log10 }, at) => {
    const exponent = log10[at.d][at.L][at.cells];
    return { depth: exponent < 6 ? number(10 ** exponent) : `about 10 to the power ${exponent.toFixed(1)}` };
  },
  rate: ({ log10 }, at) => {
    const value = log10[at.n][at.eps][at.L];
    return { xi: value === null ? "beyond the range of floating-point numbers" : `${value}${value > 0 ? ", vacuous for an error below one" : ""}` };
  },
};

for (const form of document.querySelectorAll("form.explorer")) {
  const table = tables[form.dataset.table], inputs = [...form.querySelectorAll("input[type=range]")];
  const update = () => {
    const at = Object.fromEntries(inputs.map((input) => [input.name, Number(input.value)]));
    for (const input of inputs) {
      const stop = table.stops[input.name][at[input.name]];
      const text = typeof stop === "number" && stop >= 1e6 ? stop.toExponential(0) : String(stop);
      input.setAttribute("aria-valuetext", text);
      input.nextElementSibling.textContent = text;
    }
    const values = look[form.dataset.table](table, at);
    for (const [name, text] of Object.entries(values)) form.querySelector(`[data-out="${name}"]`).textContent = text;
  };
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  update();
}
