// Files of audit entries: all that a filter selects, as CSV for spreadsheets or as lines of JSON, which are whole
// entries and can be verified.
import {get} from './api.js';

const perRequest = 100;

// selected reads the entries of a filter, newest first, up to most. progress gets their number after each page.
export async function selected(filter, most, progress, signal) {
  let entries = [], cursor;
  do {
    const page = await get('/api/v2/audit/logs', {...filter, cursor, limit: Math.min(perRequest, most - entries.length)}, signal);
    entries = [...entries, ...page.entries];
    cursor = page.next_cursor;
    progress(entries.length);
  } while (cursor && entries.length < most);
  return {entries, whole: !cursor};
}

const fields = {
  sequence: e => e.sequence, time: e => e.timestamp, event: e => e.event_type, outcome: e => e.outcome,
  actor_type: e => e.actor.type, actor_id: e => e.actor.id, actor_name: (e, names) => names.get(e.actor.id)?.name,
  resource_type: e => e.resource.type, resource_id: e => e.resource.id, resource_name: (e, names) => names.get(e.resource.id)?.name,
  source_address: e => e.source_ip, request_id: e => e.request_id, hash: e => e.hash,
};

// cell quotes a field (RFC 4180). A spreadsheet would run what begins like a formula, so that gets a quote before it, also
// behind the characters at which some of them begin another cell.
function cell(value) {
  const text = String(value ?? '').replace(/(^|[;,\t\r\n])(\s*)([=+\-@\uff1d\uff0b\uff0d\uff20])/g, "$1'$2$3");
  return /[";,\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export const asCSV = (entries, names) => [Object.keys(fields), ...entries.map(e => Object.values(fields).map(of => of(e, names)))]
  .map(row => row.map(cell).join(',') + '\r\n').join('');

export const asLines = entries => entries.map(e => JSON.stringify(e) + '\n').join('');
