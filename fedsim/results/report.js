// Tables sort by a click on a column's head: numbers by their data-value, words by the alphabet, empty cells last.
// A column of numbers begins with its greatest, one of words with its first; the next click turns the order round.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
    const numbers = [...body.rows].every(row => !Number.isNaN(Number(key(row))));
    const before = head.getAttribute("aria-sort");
    const up = before ? before === "descending" : !numbers;
    const rows = [...body.rows].sort((one, other) => {
      const [a, b] = [key(one), key(other)];
      if (a === "" || b === "") return (a === "") - (b === "");
      const [x, y] = [Number(a), Number(b)];
      const words = Number.isNaN(x) - Number.isNaN(y); // numbers stand before words
      return (up ? 1 : -1) * (words || (Number.isNaN(x) ? a.localeCompare(b) : x - y));
    });
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    body.append(...rows);
  }));
}

// A figure fits the screen; a click shows it large, to be scrolled.
for (const image of document.querySelectorAll("figure img"))
  image.addEventListener("click", () => image.classList.toggle("large"));
