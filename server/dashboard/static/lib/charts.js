// What happened, day by day: pictures with axes, and tables that say the same and lead to the entries of a day.
import {html} from '../vendor/preact.js';
import {count, number} from './format.js';
import {Link, Table, navigate} from './ui.js';

const series = [['secrets', 'Secrets read', '/audit?show=secrets'], ['changes', 'Changes', '/audit?show=changes'], ['denials', 'Denials', '/audit?show=denied']];
const dayText = new Intl.DateTimeFormat(undefined, {day: 'numeric', month: 'short', timeZone: 'UTC'});
const yearText = new Intl.DateTimeFormat(undefined, {dateStyle: 'medium', timeZone: 'UTC'});
const inWords = (date, text = dayText) => text.format(new Date(date));
const entriesOf = date => '/audit?' + new URLSearchParams({from: date + 'T00:00:00.000Z', to: date + 'T23:59:59.999Z'});

const wide = 300, high = 50;

// Chart is a picture of the size above with its axes: marks are numbers at equal steps, the highest first, and dates
// are the first, one in the middle and the last.
const Chart = ({label, marks, dates, children}) => html`<figure class="chart">
  <div class="marks" aria-hidden="true">${marks.map(mark => html`<span key=${mark}>${number(mark)}</span>`)}</div>
  <svg viewBox=${`0 0 ${wide} ${high}`} preserveAspectRatio="none" role="img" aria-label=${label}>
    ${marks.map((mark, i) => html`<line key=${mark} class="axis" x1="0" x2=${wide} y1=${i * high / (marks.length - 1)} y2=${i * high / (marks.length - 1)} />`)}
    ${children}
  </svg>
  <figcaption>${dates.map(date => html`<span key=${date}>${date}</span>`)}</figcaption>
</figure>`;

const AsTable = props => html`<details><summary>As a table</summary><div class="tall"><${Table} dense rowKey="date" ...${props} /></div></details>`;

// Days shows the activity of GET /api/v2/overview. Denials are attempts, which the other two count as well.
export function Days({of: {days, complete}}) {
  const total = name => days.reduce((n, d) => n + (d[name] ?? 0), 0);
  const most = Math.max(1, ...days.map(d => Math.max(...series.map(([name]) => d[name] ?? 0)))), top = most + most % 2;
  const height = n => n === 0 ? 0 : Math.max(1.5, n * high / top), step = wide / days.length, bar = (step - 2) / 3;
  const said = series.map(([name, text]) => `${text} ${number(total(name))}`).join(', ');
  return html`
    <ul class="legend">${series.map(([name, text, to]) => html`<li key=${name} class=${name}><span class="key" aria-hidden="true"></span><${Link} to=${to}>${text}<//> <strong>${number(total(name))}</strong></li>`)}</ul>
    <${Chart} label=${`The last ${count(days.length, 'day')}: ${said}. The table has each day.`} marks=${[top, top / 2, 0]}
      dates=${[inWords(days[0].date), inWords(days[Math.floor(days.length / 2)].date), `${inWords(days.at(-1).date)}, UTC`]}>
      ${days.map((d, i) => html`<g key=${d.date} onClick=${() => navigate(entriesOf(d.date))}><title>${inWords(d.date)}: ${series.map(([name, text]) => `${text} ${d[name] ?? 'not known'}`).join(', ')}</title>
        <rect class="ground" x=${i * step} y="0" width=${step} height=${high} />
        ${series.map(([name], n) => html`<rect key=${name} class=${name} x=${i * step + 1 + n * bar} y=${high - height(d[name] ?? 0)} width=${bar} height=${height(d[name] ?? 0)} />`)}</g>`)}
    <//>
    ${!complete && html`<p class="quiet">Not everything is counted: the oldest days or the denials are missing.</p>`}
    <${AsTable} caption="Activity by day, in UTC" rows=${[...days].reverse()} columns=${[
      {title: 'Day', cell: d => html`<${Link} to=${entriesOf(d.date)}>${inWords(d.date)}<//>`},
      ...series.map(([name, title]) => ({title, class: 'number', cell: d => d[name] === undefined ? html`<span class="quiet">not known</span>` : number(d[name])})),
    ]} />`;
}

const rounded = score => Math.round(score * 10) / 10;

// Trend shows the scores of GET /api/v2/compliance/history, of 100. to returns the address of one.
export function Trend({scores, name, to}) {
  if (scores.length < 2) return html`<p class="quiet">A trend is shown once there are scores of two days.</p>`;
  const first = scores[0], last = scores.at(-1), from = Date.parse(first.date), span = Date.parse(last.date) - from;
  const at = s => `${((Date.parse(s.date) - from) * wide / span).toFixed(2)} ${(high - s.score * high / 100).toFixed(2)}`;
  const said = `${rounded(first.score)} on ${inWords(first.date, yearText)} to ${rounded(last.score)} on ${inWords(last.date, yearText)}`;
  return html`
    <${Chart} label=${`${name}, of 100: from ${said}. The table has each day.`} marks=${[100, 50, 0]}
      dates=${[inWords(first.date, yearText), ...span > 86400e3 ? [inWords(from + span / 2)] : [], `${inWords(last.date, yearText)}, UTC`]}>
      <path class="line" d=${'M' + scores.map(at).join('L')} />
      ${scores.map(s => html`<path key=${s.date} class="dot" d=${`M${at(s)}h0`} onClick=${() => navigate(to(s))}><title>${inWords(s.date, yearText)}: ${rounded(s.score)} of 100</title></path>`)}
    <//>
    <${AsTable} caption=${`Scores of ${name} by day`} rows=${[...scores].reverse()} columns=${[
      {title: 'Day (UTC)', cell: s => inWords(s.date, yearText)},
      {title: 'Score of 100', class: 'number', cell: s => html`<${Link} to=${to(s)}>${rounded(s.score)}<//>`},
    ]} />`;
}
