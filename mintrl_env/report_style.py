"""The report's style sheet and its script. Colours are variables: light, dark, and light in print.

Authors differ by colour and by mark: the judge's text is underlined between `{+ +}`, dropped text
is struck through between `[- -]` (the signs of `git diff --word-diff`), the
environment's is framed.
"""

from __future__ import annotations

_LIGHT = """
  color-scheme: light;
  --page: #f6f7f9; --card: #ffffff; --ink: #1a1d21; --soft: #565d66; --faint: #b9c0c8;
  --line: #dde1e6; --code: #fbfbfc;
  --judge: #0b4f8a; --judge-bg: #dcecfb; --drop: #a11d1d; --drop-bg: #fde7e6;
  --env: #6a4a00; --env-bg: #fdf3d7;
  --good: #14672f; --good-bg: #dff3e4; --bad: #9c1c1c; --bad-bg: #fbe4e3;
  --doubt: #6b5200; --doubt-bg: #fbf0cf; --plain: #404750; --plain-bg: #e9ecef;
"""

_DARK = """
  color-scheme: dark;
  --page: #14171a; --card: #1c2024; --ink: #e7eaee; --soft: #a3acb6; --faint: #59626c;
  --line: #343a41; --code: #16191c;
  --judge: #9fd0ff; --judge-bg: #143a5c; --drop: #ffaaa4; --drop-bg: #4d1f1e;
  --env: #f1d48a; --env-bg: #40340f;
  --good: #9be0ae; --good-bg: #173d24; --bad: #ffaaa4; --bad-bg: #4d1f1e;
  --doubt: #f1d48a; --doubt-bg: #40340f; --plain: #c4cbd3; --plain-bg: #2d333a;
"""

CSS = (
    f":root {{{_LIGHT}}}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{{_DARK}}} }}\n"
    f"@media print {{ :root {{{_LIGHT}}} }}\n"
    + """
:root { --sans: system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 var(--sans); }
main { max-width: 72rem; margin: 0 auto; padding: 2rem 1.5rem 5rem; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 .75rem; padding-top: .75rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 2.25rem 0 .5rem; }
h4 { font-size: 1rem; margin: 0; display: inline; }
p { margin: .4rem 0; max-width: 46rem; }
a { color: inherit; }
:focus-visible { outline: 3px solid var(--judge); outline-offset: 2px; }
:target { box-shadow: 0 0 0 3px var(--judge-bg); }
.soft { color: var(--soft); }
.small { font-size: .86rem; }
nav ul { list-style: none; padding: 0; margin: 1rem 0 0; display: flex; flex-wrap: wrap;
  gap: .25rem 1.25rem; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%);
  white-space: nowrap; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .28rem .9rem .28rem 0;
  border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; font-size: .86rem; vertical-align: bottom; }
tbody th { font-weight: 400; }
td.n, th.n { text-align: right; }
td.n { white-space: nowrap; }
td.big span { font-weight: 400; }
td.big { font-weight: 700; font-size: 1.15rem; }
img.curves { display: block; width: 100%; height: auto; background: #fff;
  border: 1px solid var(--line); border-radius: 6px; padding: .5rem; }
details > summary { cursor: pointer; color: var(--soft); padding: .2rem 0; }
.warn { border-left: 4px solid var(--doubt); background: var(--doubt-bg); padding: .5rem .8rem;
  margin: .75rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .9rem 1.1rem; margin: .75rem 0 1.25rem; }
.group { border-left: 4px solid var(--line); padding-left: 1.1rem; margin: 1rem 0 2.5rem; }
.facts { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; margin: .35rem 0 .6rem; padding: 0;
  list-style: none; color: var(--soft); font-size: .86rem; }
pre.text { margin: .4rem 0; padding: .7rem .85rem; background: var(--code);
  border: 1px solid var(--line); border-radius: 5px; font: .86rem/1.75 var(--mono);
  white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4;
  max-height: 40rem; overflow-y: auto; }
.group > p { max-width: none; }
.badge, .mark, .special { font-size: .8rem; border-radius: 4px; padding: .08rem .42rem;
  white-space: nowrap; }
.badge { font-weight: 600; }
.good { color: var(--good); background: var(--good-bg); }
.bad { color: var(--bad); background: var(--bad-bg); }
.doubt { color: var(--doubt); background: var(--doubt-bg); }
.plain { color: var(--plain); background: var(--plain-bg); }
.revise { color: var(--judge); background: var(--judge-bg); }
.mark { font-family: var(--sans); font-weight: 600;
  border: 1px solid currentColor; padding: 0 .35rem; font-size: .72rem; margin: 0 .12rem;
  text-decoration: none; display: inline-block; line-height: 1.35; }
ins.judge { color: var(--judge); background: var(--judge-bg); text-decoration: underline;
  text-decoration-thickness: 2px; text-underline-offset: 3px; }
del.dropped { color: var(--drop); background: var(--drop-bg); text-decoration: line-through;
  text-decoration-thickness: 1px; }
samp.environment { font: inherit; color: var(--env); background: var(--env-bg);
  outline: 1px dashed currentColor; outline-offset: -1px; }
ins.judge::before { content: "{+"; } ins.judge .end::before { content: "+}"; }
del.dropped::before { content: "[-"; } del.dropped .end::before { content: "-]"; }
ins.judge::before, del.dropped::before, .end::before {
  font-weight: 700; display: inline-block; text-decoration: none; padding: 0 .1em; }
.special { font-family: inherit; color: var(--plain); background: var(--plain-bg); }
.gap { font: italic .8rem var(--sans); color: var(--soft); display: inline-block;
  border: 1px dotted var(--faint); border-radius: 4px; padding: 0 .4rem; }
.nl::before { content: "\\21B5"; color: var(--faint); display: inline-block; }
.tab::before { content: "\\2192"; color: var(--faint); position: absolute; }
.ws { white-space: pre-wrap; background-size: 1ch 100%;
  background-image: radial-gradient(circle at center, var(--faint) 1px, transparent 1.4px); }
.odd { color: var(--doubt); background: var(--doubt-bg); border-radius: 3px; padding: 0 .15em; }
.reviews { width: 100%; font-size: .86rem; margin-top: .5rem; }
.reviews td.why { width: 45%; min-width: 12rem; overflow-wrap: anywhere; white-space: pre-wrap; }
dl.legend { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.2rem;
  margin: .8rem 0; align-items: baseline; }
dl.legend dt { font: .86rem var(--mono); }
dl.legend dd { margin: 0; max-width: 46rem; }
#fresh { position: fixed; right: 1rem; bottom: 1rem; }
#fresh a { display: block; background: var(--ink); color: var(--page); border-radius: 6px;
  padding: .5rem .9rem; }
@media (max-width: 40rem) { main { padding: 1rem .75rem 3rem; } .group { padding-left: .6rem; } }
@media print {
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { font-size: 10pt; background: #fff; }
  main { max-width: none; padding: 0; }
  nav, #fresh, .aside { display: none; }
  h2, h3, h4 { break-after: avoid; }
  tr, .facts { break-inside: avoid; }
  pre.text { max-height: none; }
  details::details-content { content-visibility: visible; }
}
"""
)

SCRIPT = """
addEventListener("beforeprint", () => {
  for (const d of document.querySelectorAll("details:not([open])")) {
    d.open = true; d.dataset.was = "";
  }
});
addEventListener("afterprint", () => {
  for (const d of document.querySelectorAll("details[data-was]")) {
    d.open = false; delete d.dataset.was;
  }
});
"""

# Added by the view server alone: offers a reload when the run's files have changed.
FOLLOW_SCRIPT = """
(async () => {
  const seen = document.documentElement.dataset.version;
  for (;;) {
    await new Promise(done => setTimeout(done, 3000));
    try {
      const now = await (await fetch("/version")).text();
      if (now !== seen) { document.getElementById("fresh").hidden = false; return; }
    } catch { return; }
  }
})();
"""
