// Filters the table of completions: a row stays if its prompt, completion or answer has the text.
"use strict";
function filterCompletions(root) {
  const wanted = root.querySelector(".search").value.trim().toLowerCase();
  const rows = [...root.querySelectorAll("tr.completion")], has = (text) => text.textContent.toLowerCase().includes(wanted);
  for (const row of rows) row.hidden = ![...row.querySelectorAll(".text")].some(has);
  for (const row of root.querySelectorAll("tr.more")) row.hidden = wanted !== "";
  const left = rows.filter((row) => !row.hidden).length;
  root.querySelector("output").textContent = wanted ? `${left} of ${rows.length}` : "";
}
document.addEventListener("input", (event) => {
  if (event.target.matches(".search")) filterCompletions(event.target.closest(".completions"));
});
