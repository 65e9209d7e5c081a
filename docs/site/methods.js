// The first page's table of methods sorts and filters; without this script it is a plain table.
document.addEventListener("DOMContentLoaded", () => {
  const table = document.querySelector(".methods table");
  new DataTable(table, {
    order: [], autoWidth: false, pageLength: 10, lengthMenu: [10, 25, 100], ordering: {indicators: false},
    layout: {topStart: "search", topEnd: "pageLength", bottomStart: "info", bottomEnd: "paging"},
    columnDefs: [...table.tHead.rows[0].cells].map((_, column) => ({
      targets: column, columnControl: ["order", [[1, 2, 5].includes(column) ? "searchList" : "search"]]})),
  });
});
