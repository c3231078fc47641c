// Charts over time: lines and stacked areas by uPlot, and batch sizes as a heat map. Each has a table beside it.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../../vendor/preact-htm.module.js";
import * as format from "../format.js";
import { T } from "../text.js";

const HEIGHT = 160;
const ROWS = 30; // of the table

/** The colours of the theme in use; charts are drawn anew when it changes. */
export function useTheme() {
  const read = () => {
    const style = getComputedStyle(document.documentElement);
    return Object.fromEntries(
      ["text", "muted", "line", "panel", "good", "bad", "warn", "accent", "c1", "c2", "c3", "c4", "c5"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]).concat([["font", `11px ${style.fontFamily}`]]),
    );
  };
  const [theme, setTheme] = useState(read);
  useEffect(() => {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const take = () => setTheme(read());
    dark.addEventListener("change", take);
    return () => dark.removeEventListener("change", take);
  }, []);
  return theme;
}

/** The width of an element, as it changes. */
function useWidth(element) {
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(element.current);
    return () => observer.disconnect();
  }, []);
  return width;
}

const gaps = (values) => values.map((value) => (value === undefined ? null : value));

/** Sums of the series up to each one, for stacked areas. */
export function stacked(series) {
  const sums = [];
  series.forEach((values, index) => sums.push(values.map((value, at) => (value === null ? null : value + (index ? sums[index - 1][at] || 0 : 0)))));
  return sums;
}

/** A chart. Series: [{name, color (of the theme), values}]; `times` are Unix seconds. */
export function TimeChart({ title, times, span, series, show = format.short, stack = false, log = false }) {
  const box = useRef(null);
  const plot = useRef(null);
  const range = useRef([0, 1]);
  const theme = useTheme();
  const width = useWidth(box);
  const names = series.map((each) => each.name).join();
  const drawn = stack ? stacked(series.map((each) => each.values)) : series.map((each) => each.values);
  // The largest area lies behind.
  const order = stack ? series.map((_, index) => series.length - 1 - index) : series.map((_, index) => index);
  const data = [times, ...order.map((index) => gaps(drawn[index]))];
  const now = times.length ? times[times.length - 1] : Date.now() / 1000;
  range.current = [now - span, now];
  useEffect(() => {
    if (!width || typeof uPlot === "undefined") return undefined;
    const axis = { stroke: theme.muted, font: theme.font, grid: { stroke: theme.line, width: 1 }, ticks: { show: false } };
    const chart = new uPlot(
      {
        width,
        height: HEIGHT,
        padding: [8, 10, 0, 0],
        legend: { show: false },
        cursor: { drag: { x: false, y: false }, points: { size: 6 } },
        scales: {
          x: { time: true, range: () => range.current },
          y: { range: log ? (_, low, high) => uPlot.rangeLog(low > 0 ? low : 1, high > 0 ? high : 10, 10, false) : (_, low, high) => [0, high > 0 ? high * 1.1 : 4], distr: log ? 3 : 1 },
        },
        axes: [
          { ...axis, size: 26, gap: 6, space: 70, values: (_, splits) => splits.map((t) => format.clock(t).slice(0, span > 300 ? 5 : 8)) },
          { ...axis, size: 62, space: 30, values: (_, splits) => splits.map((value) => (value === null ? "" : show(value))) },
        ],
        series: [
          {},
          ...order.map((index) => ({
            label: series[index].name,
            stroke: theme[series[index].color],
            width: stack ? 1 : 1.5,
            fill: stack ? `color-mix(in srgb, ${theme[series[index].color]} 70%, ${theme.panel})` : index === 0 ? `color-mix(in srgb, ${theme[series[index].color]} 12%, transparent)` : undefined,
            points: { show: false },
            spanGaps: false,
          })),
        ],
      },
      data,
      box.current,
    );
    plot.current = chart;
    return () => {
      chart.destroy();
      plot.current = null;
    };
  }, [theme, width, names, span, stack, log]);
  useEffect(() => {
    if (plot.current) plot.current.setData(data);
  });
  const last = (values) => {
    for (let at = values.length - 1; at >= Math.max(0, values.length - 3); at -= 1) if (values[at] !== null && values[at] !== undefined) return values[at];
    return null;
  };
  return html`<figure class="chart">
    <figcaption><span>${title}</span>
      <ul class="legend">${series.map((each) => html`<li key=${each.name}><i class=${each.color} aria-hidden="true"></i>${each.name} <b>${show(last(each.values))}</b></li>`)}</ul>
    </figcaption>
    <div ref=${box} class="plot" role="img" aria-label=${`${title}: ${series.map((each) => `${each.name} ${show(last(each.values))}`).join(", ")}`}></div>
    <${ChartTable} title=${title} times=${times} series=${series} show=${show} />
  </figure>`;
}

/** The numbers of a chart, made only while they are shown. */
function ChartTable({ title, times, series, show }) {
  const [open, setOpen] = useState(false);
  const rows = [];
  if (open) for (let at = times.length - 1; at >= Math.max(0, times.length - ROWS); at -= 1) rows.push(at);
  return html`<details class="numbers" onToggle=${(event) => setOpen(event.target.open)}>
    <summary>${T.live.table}</summary>
    ${open && html`<div class="scroll" tabindex="0" role="region" aria-label=${title}><table>
      <thead><tr><th scope="col">${T.live.time}</th>${series.map((each) => html`<th scope="col" class="number">${each.name}</th>`)}</tr></thead>
      <tbody>${rows.map((at) => html`<tr key=${times[at]}><td>${format.clock(times[at])}</td>${series.map((each) => html`<td class="number">${show(each.values[at])}</td>`)}</tr>`)}</tbody>
    </table></div>`}
  </details>`;
}

const SIZES = [1, 2, 4, 8, 16, 32, 64, 128];

/** How often batches of each size ran, by time. Batches: a map of rows to runs for each time. */
export function BatchHeat({ title, times, batches, span }) {
  const box = useRef(null);
  const canvas = useRef(null);
  const theme = useTheme();
  const width = useWidth(box);
  const places = batches.map(bySize);
  const used = SIZES.filter((_, place) => places.some((counts) => counts[place]));
  const rows = SIZES.slice(0, Math.max(SIZES.indexOf(used[used.length - 1] || 8), 3) + 1);
  useEffect(() => {
    if (width) drawHeat(canvas.current, width, theme, times, places, span, rows);
  });
  const series = rows.map((size, place) => ({ name: size === 128 ? "128+" : size === 1 ? "1" : `≤${size}`, values: places.map((counts) => counts[place]) }));
  return html`<figure class="chart">
    <figcaption><span>${title}</span><span class="hint">${T.live.batchesHint}</span></figcaption>
    <div ref=${box} class="plot"><canvas ref=${canvas} role="img" aria-label=${title}></canvas></div>
    <${ChartTable} title=${title} times=${times} series=${series} show=${format.short} />
  </figure>`;
}

/** Runs by power of two of the rows. */
export function bySize(batch) {
  const counts = SIZES.map(() => 0);
  for (const [rows, runs] of Object.entries(batch)) counts[Math.min(Math.ceil(Math.log2(Number(rows))), SIZES.length - 1)] += runs;
  return counts;
}

function drawHeat(canvas, width, theme, times, places, span, rows) {
  const scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = HEIGHT * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${HEIGHT}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.clearRect(0, 0, width, HEIGHT);
  const [left, bottom] = [62, 30];
  const now = times.length ? times[times.length - 1] : 0;
  const plotWidth = width - left - 12;
  const cell = Math.max(plotWidth / span, 1);
  const height = (HEIGHT - bottom - 8) / rows.length;
  let most = 1;
  for (const counts of places) for (const count of counts) most = Math.max(most, count);
  context.font = theme.font;
  context.textBaseline = "middle";
  rows.forEach((size, place) => {
    const y = HEIGHT - bottom - (place + 1) * height;
    context.fillStyle = theme.muted;
    context.textAlign = "right";
    context.fillText(size === 128 ? "128+" : String(size), left - 8, y + height / 2);
    context.strokeStyle = theme.line;
    context.beginPath();
    context.moveTo(left, y + height);
    context.lineTo(width - 12, y + height);
    context.stroke();
    context.fillStyle = theme.accent;
    times.forEach((t, at) => {
      const count = places[at][place];
      if (!count || now - t > span) return;
      context.globalAlpha = 0.25 + 0.75 * (Math.log1p(count) / Math.log1p(most));
      context.fillRect(left + ((t - (now - span)) / span) * plotWidth - cell, y + 1, Math.max(cell - 0.5, 1), height - 2);
    });
    context.globalAlpha = 1;
  });
}
