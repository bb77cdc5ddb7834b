// What happened, day by day: a picture, and a table that says the same and leads to the entries of a day.
import {html} from '../vendor/preact.js';
import {count, number} from './format.js';
import {Link, Table, navigate} from './ui.js';

const series = [['secrets', 'Secrets read', '/audit?show=secrets'], ['changes', 'Changes', '/audit?show=changes'], ['denials', 'Denials', '/audit?show=denied']];
const dayText = new Intl.DateTimeFormat(undefined, {day: 'numeric', month: 'short', timeZone: 'UTC'});
const inWords = date => dayText.format(new Date(date + 'T00:00:00Z'));
const entriesOf = date => '/audit?' + new URLSearchParams({from: date + 'T00:00:00.000Z', to: date + 'T23:59:59.999Z'});

// Days shows the activity of GET /api/v2/overview. Denials are attempts, which the other two count as well.
export function Days({of: {days, complete}}) {
  const total = name => days.reduce((n, d) => n + (d[name] ?? 0), 0);
  const top = Math.max(1, ...days.map(d => Math.max(...series.map(([name]) => d[name] ?? 0))));
  const height = n => n === 0 ? 0 : Math.max(1.5, n * 50 / top), wide = 300 / days.length, bar = (wide - 2) / 3;
  const said = series.map(([name, text]) => `${text} ${number(total(name))}`).join(', ');
  return html`
    <ul class="legend">${series.map(([name, text, to]) => html`<li key=${name} class=${name}><span class="key" aria-hidden="true"></span><${Link} to=${to}>${text}<//> <strong>${number(total(name))}</strong></li>`)}</ul>
    <figure class="days"><svg viewBox="0 0 300 51" preserveAspectRatio="none" role="img" aria-label=${`The last ${count(days.length, 'day')}: ${said}. The table has each day.`}>
      ${days.map((d, i) => html`<g key=${d.date} onClick=${() => navigate(entriesOf(d.date))}><title>${inWords(d.date)}: ${series.map(([name, text]) => `${text} ${d[name] ?? 'not known'}`).join(', ')}</title>
        <rect class="ground" x=${i * wide} y="0" width=${wide} height="51" />
        ${series.map(([name], n) => html`<rect key=${name} class=${name} x=${i * wide + 1 + n * bar} y=${51 - height(d[name] ?? 0)} width=${bar} height=${height(d[name] ?? 0)} />`)}</g>`)}
    </svg><figcaption><span>${inWords(days[0].date)}</span><span>at most ${number(top)} a day</span><span>${inWords(days.at(-1).date)}, UTC</span></figcaption></figure>
    ${!complete && html`<p class="quiet">Not everything is counted: the oldest days or the denials are missing.</p>`}
    <details><summary>As a table</summary><div class="tall"><${Table} dense caption="Activity by day, in UTC" rowKey="date" rows=${[...days].reverse()} columns=${[
      {title: 'Day', cell: d => html`<${Link} to=${entriesOf(d.date)}>${inWords(d.date)}<//>`},
      ...series.map(([name, title]) => ({title, class: 'number', cell: d => d[name] === undefined ? html`<span class="quiet">not known</span>` : number(d[name])})),
    ]} /></div></details>`;
}
