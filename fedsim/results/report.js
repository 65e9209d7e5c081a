// Tables sort by a click on a column's head: numbers by their data-value, everything else as text, empty cells last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
    const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
    const rows = [...body.rows].sort((one, other) => {
      const [a, b] = [key(one), key(other)];
      if (a === "" || b === "") return (a === "") - (b === "");
      const [x, y] = [Number(a), Number(b)];
      return down * (Number.isNaN(x) || Number.isNaN(y) ? -a.localeCompare(b) : x - y);
    });
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down < 0 ? "descending" : "ascending");
    body.append(...rows);
  }));
}
