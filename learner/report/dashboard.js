// The live page: tiles from the event stream at each step; charts and completions from the server, less often.
"use strict";
const MAX_POINTS = 1000, NUM_NEWEST = 10, PAUSE_MS = 2000;
const byId = (id) => document.getElementById(id), numSteps = Number(document.body.dataset.steps);
const long = (v) => v < 60 ? `${Math.round(v)} s` : v < 3600 ? `${Math.floor(v / 60)} min ${Math.round(v % 60)} s`
  : `${Math.floor(v / 3600)} h ${Math.floor(v % 3600 / 60)} min`;
let points = [], loading = false, wanted = false;

function make(parent, tag, attributes = {}, text = "") {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return parent.appendChild(made);
}
const mean = (values) => values.length ? values.reduce((sum, v) => sum + v, 0) / values.length : null;
const recent = (name, count = NUM_NEWEST) => points.slice(-count).map((p) => p[name]).filter(Number.isFinite);
function drawTiles() {
  const newest = points[points.length - 1], left = numSteps - newest.step;
  const or = (v, format) => v === null ? "–" : format(v);
  const of = (name) => mean(recent(name)), all = (name) => mean(recent(name, MAX_POINTS));
  const exact = of("reward/exact_match"), kl = of("reference/kl"), { number, seconds } = FORMATS;
  const mismatch = all("policy/mismatch_abs_logprob") ?? all("parity/abs_logprob");
  const oldest = Math.max(...recent("staleness/max"), 0);
  const remaining = !numSteps ? "" : left > 0 ? `about ${long(left * (of("time/step") || 0))} left` : "all steps done";
  const tiles = [
    ["Step", newest.step.toLocaleString("en"), remaining, numSteps ? ` / ${numSteps.toLocaleString("en")}` : ""],
    ["Reward", or(of("reward/mean"), (v) => v.toFixed(3)),
      exact === null ? "mean of ten steps" : `exact match ${exact.toFixed(3)}`],
    ["Staleness", or(of("staleness/mean"), (v) => v.toFixed(2)), `policy versions, at most ${number(oldest)}`],
    ["Speed", or(of("perf/completion_tokens_per_s"), (v) => Math.round(v).toLocaleString("en")), "tokens per second"],
    ["Weight sync", or(of("weight_sync/stall_seconds"), seconds), "without generation"],
    kl === null ? ["Mismatch", or(mismatch, (v) => minus(v.toExponential(1))), "mean |Δ logprob|"]
      : ["KL", number(kl), "to the reference"],
  ];
  byId("tiles").replaceChildren();
  for (const [label, value, note, more] of tiles) {
    const tile = make(byId("tiles"), "div", { class: "card tile" });
    make(tile, "div", { class: "label" }, label);
    const shown = make(tile, "div", { class: "value" }, value);
    if (more) make(shown, "small", {}, more);
    make(tile, "div", { class: "note" }, note);
  }
  byId("done").style.width = `${numSteps ? Math.min(100, 100 * newest.step / numSteps) : 0}%`;
  const elapsed = Number.isFinite(newest.elapsed_s) ? ` · ${long(newest.elapsed_s)} so far` : "";
  byId("told").textContent = `Slipstream run${elapsed}`;
}
async function load(path, show) {
  const answer = await fetch(path).catch(() => null);  // null: no connection
  if (answer !== null && answer.status === 200) show(await answer.text());
}
function showCompletions(html) {  // a table that someone reads or searches stays as it is
  const section = byId("completions"), search = section.querySelector(".search");
  if (search?.value || section.querySelector("details[open]")) return;
  section.hidden = false;
  section.innerHTML = html;
}
async function refresh() {  // a slow connection and a hidden tab ask less often
  wanted = true;
  if (loading || document.hidden) return;
  loading = true;
  wanted = false;
  const started = performance.now();
  try {
    await load("/charts", (text) => drawCharts(byId("charts"), JSON.parse(text)));
    await load("/completions", showCompletions);
  } catch (error) {  // such as a connection that ended within an answer; the next step asks again
    console.warn(error);
  } finally {
    setTimeout(() => { loading = false; if (wanted) refresh(); }, Math.max(PAUSE_MS, 10 * (performance.now() - started)));
  }
}
function show() {
  byId("empty").hidden = points.length > 0;
  if (finished()) state("done", "finished");
  if (points.length) drawTiles();
  refresh();
}
function state(kind, text) { byId("state").className = `state ${kind}`; byId("state").textContent = text; }
const finished = () => numSteps > 0 && points.length > 0 && points[points.length - 1].step >= numSteps;

const events = new EventSource("/events");
events.onopen = () => state("live", "live");
events.onerror = () => {
  if (!finished()) return state("lost", "no connection to the learner");
  state("done", "finished");
  events.close();
};
events.addEventListener("history", (event) => { points = JSON.parse(event.data); show(); });
events.onmessage = (event) => {
  const point = JSON.parse(event.data);
  if (points.length && point.step <= points[points.length - 1].step) points = points.filter((p) => p.step < point.step);
  points.push(point);
  if (points.length > MAX_POINTS) points = points.filter((_, i) => i % 2 === 0 || i >= points.length - NUM_NEWEST);
  show();
};
document.addEventListener("visibilitychange", () => { if (wanted) refresh(); });
