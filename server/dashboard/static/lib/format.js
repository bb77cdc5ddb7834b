// How things are written.

const instant = new Intl.DateTimeFormat(undefined, {dateStyle: 'medium', timeStyle: 'medium'});
const day = new Intl.DateTimeFormat(undefined, {dateStyle: 'medium'});
const relative = new Intl.RelativeTimeFormat('en', {numeric: 'auto'});
const grouped = new Intl.NumberFormat('en');

const brief = new Intl.DateTimeFormat(undefined, {day: '2-digit', month: 'short', hour: '2-digit', minute: '2-digit', second: '2-digit'});

// localTime is in the viewer's zone; utc, for hovering, names the zone.
export const localTime = text => instant.format(new Date(text));
export const briefTime = text => brief.format(new Date(text)); // without the year
export const localDay = text => day.format(new Date(text));
export const utc = text => new Date(text).toISOString().replace('T', ' ').replace(/(\.000)?Z$/, '') + ' UTC';

const steps = [['year', 31557600], ['month', 2629800], ['day', 86400], ['hour', 3600], ['minute', 60], ['second', 1]];

// ago is "in 3 days" or "2 hours ago".
export function ago(text, now = Date.now()) {
  const seconds = (new Date(text).getTime() - now) / 1000;
  const [unit, length] = steps.find(([, n]) => Math.abs(seconds) >= n) ?? steps.at(-1);
  return relative.format(Math.round(seconds / length), unit);
}

export const number = n => grouped.format(n);

// count is a number with its unit: count(1, 'entry', 'entries') is "1 entry".
export const count = (n, one, many = one + 's') => `${grouped.format(n)} ${n === 1 ? one : many}`;

// visible shows control and direction characters as what they are, so that a name
// cannot pretend to be another one or turn the line around. The joiners that Persian and
// some pictures are written with stay.
export const visible = text => String(text).replace(/[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g,
  c => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, '0')}⟩`);

// short is the beginning and the end of a hash or an id.
export const short = text => text.length <= 16 ? text : text.slice(0, 8) + '…' + text.slice(-6);

// overTLS is for sentences on how something goes to the server, which may be reached in
// the clear.
export const overTLS = location.protocol === 'https:' ? ' over TLS' : '';
