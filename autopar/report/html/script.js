"use strict";
// The page reads without this: it adds sorting, filters, a theme switch and a place in the contents.
const root = document.documentElement;
root.classList.add("script");
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

// -- theme: what the system says until the button says otherwise
const dark = matchMedia("(prefers-color-scheme: dark)");
const remembered = (value) => {
  try { return value ? localStorage.setItem("autopar-theme", value) : localStorage.getItem("autopar-theme"); }
  catch { return null; } // no storage for files in some browsers
};
const chosen = remembered();
if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
document.getElementById("theme").addEventListener("click", () => {
  const now = root.dataset.theme || (dark.matches ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  remembered(root.dataset.theme);
});

// -- tables: sorted by a click on a head, by the exact figures where cells have them
const valueOf = (row, column) => {
  const cell = row.cells[column];
  const exact = cell.querySelector("data");
  return exact ? Number(exact.value) : cell.textContent.trim();
};
const compare = (a, b) =>
  typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });

const sortBy = (table, head, column) => {
  const first = head.classList.contains("n") ? "descending" : "ascending";
  const other = first === "descending" ? "ascending" : "descending";
  const order = head.getAttribute("aria-sort") === first ? other : first;
  all("th[aria-sort]", table.tHead).forEach((th) => th.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  const keyed = [...table.tBodies[0].rows].map((row) => [valueOf(row, column), row]);
  keyed.sort(([a], [b]) => sign * compare(a, b));
  table.tBodies[0].append(...keyed.map(([, row]) => row));
  table.dispatchEvent(new Event("sorted"));
};

for (const table of all("table.sorts")) {
  all("th", table.tHead).forEach((head, column) => {
    if (!head.textContent) return;
    const button = document.createElement("button");
    button.type = "button";
    button.ariaLabel = `Sort by ${head.textContent}`;
    head.append(button); // over the text: what is inside a button is not repeated on paper
    button.addEventListener("click", () => sortBy(table, head, column));
  });
}

// -- filters: every word must occur; * stands for a part of a path, ** for any
const pattern = (word) => new RegExp(
  word.replace(/[.+?^${}()|[\]\\]/g, "\\$&").replace(/\*\*\/?/g, "\0").replace(/\*/g, "[^/]*").replace(/\0/g, ".*"), "i");

const FEW = 30; // rows that a long table shows until it is asked for more
for (const filter of all(".filter")) {
  const table = filter.nextElementSibling.querySelector("table");
  const input = filter.querySelector("input");
  const output = filter.querySelector("output");
  const body = table.tBodies[0];
  const texts = new Map([...body.rows].map((row) => [row, [...row.cells].map((cell) => cell.textContent).join(" ")]));
  const more = document.createElement("button");
  more.type = "button";
  filter.nextElementSibling.after(more);
  let most = texts.size > FEW * 1.5 ? FEW : Infinity;
  const apply = () => {
    const words = input.value.split(/[\s,]+/).filter(Boolean).map(pattern);
    let found = 0;
    for (const row of body.rows) {
      const matches = words.every((word) => word.test(texts.get(row)));
      found += matches;
      row.hidden = !matches || found > most;
    }
    const rows = texts.size === 1 ? "1 row" : `${texts.size} rows`;
    output.value = found === texts.size ? rows : `${found} of ${rows}`;
    more.hidden = found <= most;
    more.textContent = `Show all ${found} rows`;
  };
  const unfold = () => { most = Infinity; apply(); };
  input.addEventListener("input", apply);
  table.addEventListener("sorted", apply);
  more.addEventListener("click", unfold);
  addEventListener("beforeprint", unfold);
  apply();
}

// -- contents: where the reader is
const links = new Map(all("nav a").map((a) => [a.hash.slice(1), a]));
const visible = new Set();
const watch = new IntersectionObserver((entries) => {
  for (const e of entries) visible[e.isIntersecting ? "add" : "delete"](e.target.id);
  const current = [...links.keys()].find((id) => visible.has(id));
  for (const [id, link] of links) link.setAttribute("aria-current", id === current);
}, { rootMargin: "-48px 0px -60% 0px" });
all("main > section").forEach((section) => watch.observe(section));

// -- print: nothing stays folded
addEventListener("beforeprint", () => all("details").forEach((d) => { d.open = true; }));

document.getElementById("save").addEventListener("click", () => {
  const blob = new Blob([document.getElementById("figures").textContent], { type: "application/json" });
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: "report.json" });
  link.click();
  URL.revokeObjectURL(link.href);
});
