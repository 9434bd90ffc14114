// Filters the table of completions: a row stays if its prompt, completion or answer has the text.
"use strict";
function filterCompletions(root) {
  const wanted = root.querySelector(".search").value.trim().toLowerCase(), rows = [...root.querySelectorAll("tr.completion")];
  for (const row of rows) row.hidden = ![...row.querySelectorAll(".text")].some((cell) => cell.textContent.toLowerCase().includes(wanted));
  for (const row of root.querySelectorAll("tr.more")) row.hidden = wanted !== "";
  root.querySelector("output").textContent = wanted ? `${rows.filter((row) => !row.hidden).length} of ${rows.length}` : "";
}
document.addEventListener("input", (event) => {
  if (event.target.matches(".search")) filterCompletions(event.target.closest(".completions"));
});
