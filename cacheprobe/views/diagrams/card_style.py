"""Defines the CSS rules of pictures and cards, in a notebook or on a page of cacheprobe, and of the lens grid."""

from cacheprobe.views.style import MONO

GRID_CSS = """
.cp .column text{text-anchor:middle}
.cp .agrees{fill:none;stroke:var(--green-edge);stroke-width:2;pointer-events:none}
.cp .v-1 rect{fill:var(--blank)}
.cp .column .computed{display:none;stroke:var(--ink);stroke-width:4}
.cp .legend .shades{width:210px;height:29px}
"""
"""CSS rules of the lens grid; `style.SHADE_CSS` colours its cells."""

CARD_CSS = f"""
.cp.alone{{background:var(--paper);padding:12px 14px;border-radius:8px;font-size:15px;line-height:1.5}}
.cp.alone h3{{font-size:17px;line-height:1.35;margin:0 0 4px;overflow-wrap:anywhere;font-weight:700}}
.cp.alone h4{{font-size:14px;line-height:1.4;margin:10px 0 6px}}
.cp.alone .note,.cp.alone figcaption{{font-size:13px;color:var(--muted);margin:2px 0 10px;line-height:1.45}}
.cp.alone .scroll table{{border-collapse:collapse;font-size:13.5px;width:100%;margin:0}}
.cp.alone .scroll th,.cp.alone .scroll td{{text-align:left;padding:5px 14px 5px 0;vertical-align:top;
  border-bottom:1px solid var(--line);overflow-wrap:break-word;max-width:60ch}}
.cp.alone .panels{{grid-template-columns:repeat(auto-fit,minmax(min(205px,100%),1fr));margin-top:8px}}
.cp .scroll{{overflow-x:auto;max-width:100%;padding-bottom:2px}}
.cp code{{font-family:{MONO};font-size:.92em;background:none;color:inherit;padding:0}}
.cp svg .rule{{stroke:var(--line);stroke-width:1;fill:none}}
.cp svg .cursor{{fill:none;stroke:var(--ink);stroke-width:2;pointer-events:none}}
.cp svg .written{{stroke:var(--ink);stroke-width:2.4;fill:none}}
.cp svg .new .box{{stroke:var(--ink);stroke-width:2}}
.cp .cylinder{{margin:8px 0 0}}
.cp .facts{{margin:0 0 10px;display:grid;gap:3px;font-size:13.5px}}
.cp .facts div{{display:grid;grid-template-columns:84px minmax(0,1fr);gap:8px}}
.cp .facts dt{{color:var(--muted);font-weight:400}}
.cp .facts dd{{margin:0;overflow-wrap:anywhere}}
.cp .kept{{color:var(--green-edge)}}
.cp .lost{{color:var(--red-edge)}}
.cp .ladder{{max-height:680px;overflow:auto;border:1px solid var(--line);border-radius:8px}}
.cp.alone .ladder{{max-width:560px}}
.cp .ladder table{{border-collapse:separate;border-spacing:1px;width:100%;font-size:11.5px;table-layout:fixed;margin:0}}
.cp .ladder th{{font-weight:400;color:var(--muted);padding:1px 6px;text-align:right;width:44px}}
.cp .ladder thead th{{position:sticky;top:0;background:var(--paper);z-index:1;text-align:left;width:auto}}
.cp .ladder thead th:first-child{{width:44px;text-align:right}}
.cp .ladder td{{padding:1px 4px;white-space:nowrap;overflow:hidden;text-overflow:clip;border-radius:3px;
  font-family:{MONO};border:0;text-align:left;
  background:color-mix(in srgb,var(--violet) calc(6% + var(--p) * 74%),var(--paper))}}
.cp .ladder td.right{{box-shadow:inset 0 0 0 2px var(--green-edge)}}
.cp .verdicts{{display:flex;flex-wrap:wrap;gap:6px;margin:10px 0;max-height:168px;overflow-y:auto;padding:2px}}
.cp .verdict{{border:1px solid var(--line);background:var(--paper);border-radius:8px;padding:3px 10px;
  font-size:13px;color:var(--ink)}}
.cp .verdict small{{color:var(--muted)}}
.cp .verdict.kept b{{color:var(--green-edge)}}
.cp .verdict.lost b{{color:var(--red-edge)}}
.cp .verdict.lost{{border-color:var(--red-edge);border-style:dashed}}
.cp .verdict.chosen{{box-shadow:inset 0 0 0 2px var(--ink)}}
.cp .two{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:0 24px}}
.cp .two h4{{margin:6px 0;font-size:13.5px;overflow-wrap:anywhere}}
.cp .tokens{{margin:0;line-height:2.05}}
.cp .tok{{background:var(--card);border:1px solid var(--line);border-radius:5px;padding:2px 5px;
  font-family:{MONO};font-size:12px}}
.cp .tok.first{{background:var(--red);border:2px solid var(--red-edge);font-weight:700}}
.cp .tok.after{{opacity:.62}}
.cp del.tok{{color:var(--red-edge);border-style:dashed}}
.cp .aligned td{{vertical-align:bottom;padding:2px;border:0;text-align:left}}
.cp .aligned td .tok{{display:block;white-space:pre;margin-top:2px}}
.cp .aligned th{{position:sticky;left:0;background:var(--paper);vertical-align:bottom;padding:4px 10px 4px 0;
  white-space:nowrap}}
.cp .sites{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(240px,100%),1fr));gap:12px}}
.cp .sites section{{border:1px solid var(--line);border-radius:8px;padding:8px 12px;background:var(--card)}}
.cp .sites h4{{margin:0 0 4px;font-size:15px}}
.cp .sites small{{color:var(--muted);font-weight:400}}
.cp .sites p{{margin:0;font-size:13.5px;overflow-wrap:anywhere}}
.cp .prose{{white-space:pre-wrap;overflow-wrap:anywhere;font-size:14.5px;line-height:1.75;unicode-bidi:isolate}}
.cp .prose .asked{{color:var(--muted)}}
.cp .prose span,.cp .legend i{{border-radius:3px;font-style:normal}}
.cp .legend i{{padding:0 3px}}
.cp :is(.prose,.legend) .accepted{{background:var(--green)}}
.cp :is(.prose,.legend) .own{{border-bottom:2px solid var(--green-edge)}}
.cp :is(.prose,.legend) .undrafted{{border-bottom:1px solid var(--grey-edge)}}
.cp :is(.prose,.legend) .shade{{
  background:color-mix(in srgb,var(--violet) calc(4% + var(--p) * 86%),var(--paper))}}
.cp .legend .ramp i{{padding:0 6px;border-radius:0}}
.cp .prose rt{{font-size:11.5px;line-height:1.2;text-align:center;padding:0 4px 2px}}
.cp .passes{{margin:10px 0 0;font-size:12.5px;border-collapse:collapse}}
.cp .passes :is(th,td){{text-align:left;padding:3px 10px 3px 0}}
.cp .passes .number{{text-align:right}}.cp .passes .lost{{color:var(--red-edge)}}.cp .passes .chosen{{font-weight:650}}
.cp :is(.prose,.legend) del{{color:var(--red-edge);text-decoration:line-through}}
.cp .prose del+del{{margin-left:5px}}
.cp .prose .thought{{ruby-position:under}}
.cp .prose .thought>rt{{color:var(--blue-edge);font-style:italic}}
"""
"""CSS rules of pictures and cards; they also undo a notebook's own rules for tables, code and headings."""
