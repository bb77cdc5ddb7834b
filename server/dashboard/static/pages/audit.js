// The audit log of the tenant: read, followed, and verified in the page.
import {html, useEffect, useRef, useState} from '../vendor/preact.js';
import {useAccount} from '../lib/account.js';
import {get, queryString} from '../lib/api.js';
import {Days} from '../lib/charts.js';
import {count, number} from '../lib/format.js';
import {deed, eventTypes, isOf} from '../lib/words.js';
import {Actor, Fingerprint, Outcome, Resource, checkEntry, follow, openLog, verdict} from '../lib/log.js';
import {idsOf, namesOf, useNames} from '../lib/names.js';
import {Act, Choice, Dialog, Empty, Facts, Hash, Input, Link, Loaded, Page, Pages, Panel, Skeleton, Table, Tag, Time, Trouble, save, say, setQuery, useAsked, useHere, useLoad} from '../lib/ui.js';
import {Reviews} from './reviews.js';

const fields = ['event_type', 'outcome', 'user_id', 'resource_id', 'from', 'to'];

// Presets are what most people look for, by the name in the address.
const presets = {'': ['Everything', {}], changes: ['Changes', {category: 'changes'}], secrets: ['Access to secrets', {category: 'secrets'}], denied: ['Denied', {outcome: 'denied'}]};
const perPage = 50, mostRows = 200;

const filtersOf = query => Object.fromEntries(fields.map(name => [name, query.get(name) ?? '']));

export function Audit() {
  const account = useAccount();
  const {query} = useHere();
  const filters = filtersOf(query), cursor = query.get('cursor') ?? '';
  const preset = Object.hasOwn(presets, query.get('show') ?? '') ? query.get('show') ?? '' : '';
  const selection = {...filters, ...presets[preset][1]};
  const log = useLoad(signal => get('/api/v2/audit/logs', {...selection, cursor, limit: perPage}, signal), [...Object.values(filters), preset, cursor]);
  const live = useTail(selection, log.reload);
  // What is followed is the present: neither an earlier page nor one that ends in the past.
  const present = !cursor && !filters.to;
  useEffect(() => { if (!present) live.pause(); }, [present]);
  const listed = log.data?.entries ?? [], newest = listed[0]?.sequence ?? 0;
  const rows = [...live.entries.filter(e => present && e.sequence > newest), ...listed].slice(0, mostRows);
  const names = useNames(idsOf(rows)), checks = useChecks();
  // Without these filters the list has every entry between its first and its last.
  const whole = preset === '' && !['event_type', 'outcome', 'user_id', 'resource_id'].some(name => filters[name]);
  const start = () => {
    if (!present) setQuery({cursor: '', to: ''});
    live.start();
  };
  return html`<${Page} title="Audit log" lead="Everything that was done in your organisation, newest first. Each entry is signed and names the hash of the one before it. Reading the log is recorded too."
      actions=${html`
        ${live.state === 'off' ? html`<button type="button" onClick=${start}>${live.entries.length > 0 ? 'Resume' : 'Follow'}</button>`
          : html`<button type="button" onClick=${live.pause}>Pause</button>`}
        <${Download} selection=${selection} />
        <button type="button" class="primary" disabled=${rows.length === 0 || checks.busy || log.loading} onClick=${() => checks.run(rows, whole)}>Verify this page</button>`}>
    <${Reviews} onDone=${log.reload} />
    <nav class="row tabs" aria-label="Entries">${Object.entries(presets).map(([name, [text]]) => html`
      <${Link} key=${name} to=${'/audit' + queryString({show: name, from: filters.from, to: filters.to})} aria-current=${name === preset ? 'page' : undefined}>${text}<//>`)}</nav>
    <${Timeline} />
    <${Filters} filters=${filters} />
    <${Following} live=${live} />
    <${Checks} of=${checks} />
    <${Loaded} of=${log} lines=${8}>${({next_cursor: next}) => html`
      ${rows.length === 0 && log.loading ? html`<${Skeleton} lines=${8} />` : rows.length === 0 ? html`<${Empty} title=${next ? 'None so far' : 'No entry matches'}>${next
          ? html`<p>There is none among the newest entries. Older ones have not been looked at yet.</p>`
          : html`<p>Widen the filter, or show everything.</p>`}
        ${(preset || Object.values(filters).some(Boolean)) && html`<${Link} class="button" to="/audit">Show everything<//>`}<//>`
      : html`<${Entries} rows=${rows} newest=${newest} names=${names} verdicts=${checks.verdicts} />`}
      <${Pages} next=${next} shown=${count(rows.length, 'entry', 'entries')} />`}<//>
  <//>`;
}

// Timeline shows the last 30 days once somebody opens it: a day leads to its entries.
function Timeline() {
  const [open, setOpen] = useState(false);
  return html`<details class="panel" onToggle=${e => setOpen(e.currentTarget.open)}><summary>Timeline</summary>${open && html`<${Timed} />`}</details>`;
}

function Timed() {
  const overview = useLoad(signal => get('/api/v2/overview', undefined, signal), []);
  return html`<${Loaded} of=${overview}>${({activity}) => activity ? html`<div class="stack"><${Days} of=${activity} /></div>` : html`<p class="quiet">It cannot be shown at the moment.</p>`}<//>`;
}

// folded puts entries beside each other that say the same of the same actor and resource: lists of entries.
function folded(rows) {
  const same = (a, b) => ['event_type', 'outcome'].every(name => a[name] === b[name]) && a.actor.id === b.actor.id && a.resource.id === b.resource.id;
  const groups = [];
  for (const e of rows) {
    if (groups.length > 0 && same(groups.at(-1)[0], e)) groups.at(-1).push(e);
    else groups.push([e]);
  }
  return groups;
}

// Entries has a row for each entry, and one for those that repeat, until somebody unfolds them.
function Entries({rows, newest, names, verdicts}) {
  const account = useAccount();
  const [open, setOpen] = useState(new Set()); // sequences of the oldest entries of what is unfolded
  const groups = folded(rows).flatMap(group => open.has(group.at(-1).sequence) ? group.map(e => [e]) : [group]).map(group => ({first: group[0], all: group, sequence: group.at(-1).sequence}));
  const of = cell => row => cell(row.first);
  return html`<${Table} dense caption="Audit entries, newest first" rowKey="sequence" rows=${groups} rowClass=${row => row.first.sequence > newest ? 'new' : ''} columns=${[
    {title: 'Time', class: 'fit', cell: of(e => html`<${Time} at=${e.timestamp} short />`)},
    {title: 'Event', cell: ({first: e, all, sequence}) => html`<span><${Link} to=${'/audit/' + e.sequence}>${deed(e)}<//>${all.length > 1 && html` <button type="button" class="small" aria-label=${`Show all ${all.length} entries: ${deed(e)}`} onClick=${() => setOpen(new Set([...open, sequence]))}>× ${all.length}</button>`}</span>`},
    ...(verdicts ? [{title: 'Verified here', class: 'whole', cell: row => html`<${Verdict} of=${worst(row.all.map(e => verdicts.get(e.sequence)))} />`}] : []),
    {title: 'Outcome', class: 'fit', cell: of(e => html`<${Outcome} of=${e.outcome} />`)},
    {title: 'Actor', cell: of(e => html`<${Actor} of=${e.actor} mine=${account.user?.user_id} name=${names.get(e.actor.id)?.name} />`)},
    {title: 'Resource', cell: of(e => html`<${Resource} of=${e.resource} name=${names.get(e.resource.id)?.name} />`)},
    {title: 'Sequence', class: 'number', cell: ({first, all}) => all.length > 1 ? `${number(all.at(-1).sequence)}–${number(first.sequence)}` : number(first.sequence)},
  ]} />`;
}

// worst of the checks of several entries: those that fail, or are missing, before those that hold.
function worst(all) {
  const rank = checks => !checks ? 1 : {bad: 3, plain: 2, good: 0}[verdict(checks)];
  return all.reduce((a, b) => rank(b) > rank(a) ? b : a);
}

const mostExported = 5000;

// Download makes a file of all entries that the filters select. Each request is recorded, as any look at the log.
function Download({selection}) {
  const account = useAccount();
  const [asked, setAsked] = useAsked({export: true});
  const make = as => async () => {
    const {asCSV, asLines, selected} = await import('../lib/export.js');
    const {entries, whole} = await selected(selection, mostExported, n => say(`${number(n)} entries read`));
    save(`audit-log.${as}`, as === 'csv' ? asCSV(entries, await namesOf(account, idsOf(entries))) : asLines(entries), as === 'csv' ? 'text/csv' : 'application/x-ndjson');
    say(whole ? `${count(entries.length, 'entry', 'entries')} exported` : `The newest ${number(entries.length)} entries are exported. Narrow the filter for older ones, or use latticekeep audit export.`);
    setAsked(false);
  };
  return html`<button type="button" onClick=${() => setAsked(true)}>Export</button>
    ${asked && html`<${Dialog} title="Export entries" onClose=${() => setAsked(false)}>
      <div class="stack"><p>All entries that the filters select, newest first, at most ${number(mostExported)}. NDJSON has whole entries, which can be verified. CSV is for spreadsheets.</p>
        <div class="actions"><${Act} kind="primary" onClick=${make('csv')}>CSV<//><${Act} onClick=${make('ndjson')}>NDJSON<//></div></div>
    <//>`}`;
}

// ---- filters

const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;

// A moment as a field for local times has it, and back.
const toLocal = text => {
  const at = new Date(text);
  return text && !Number.isNaN(at.getTime()) ? new Date(at.getTime() - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 19) : '';
};
const fromLocal = text => text ? new Date(text).toISOString() : '';

// Filters are applied by a button, since each look at the log is recorded in it.
function Filters({filters}) {
  const applied = () => ({...filters, from: toLocal(filters.from), to: toLocal(filters.to)});
  const [state, setState] = useState(applied);
  useEffect(() => setState(applied()), Object.values(filters)); // the back button changes them too
  const set = name => value => setState(s => ({...s, [name]: value}));
  const backwards = state.from && state.to && state.from > state.to;
  const apply = e => {
    e.preventDefault();
    if (backwards) return;
    setQuery({...state, user_id: state.user_id.trim(), resource_id: state.resource_id.trim(), from: fromLocal(state.from), to: fromLocal(state.to), cursor: ''});
  };
  const given = Object.values(filters).filter(Boolean).length;
  const [open] = useState(given > 0); // from then on it is the reader's to open and close
  return html`<details class="panel" open=${open}>
    <summary>Filter${given > 0 ? ` (${count(given, 'condition')})` : ''}</summary>
    <form onSubmit=${apply}>
      <div class="filters">
        <${Choice} label="Event" value=${state.event_type} onInput=${set('event_type')} options=${[['', 'All'], ...eventTypes]} />
        <${Choice} label="Outcome" value=${state.outcome} onInput=${set('outcome')} options=${[['', 'All'], ['success', 'Success'], ['denied', 'Denied'], ['failure', 'Failure']]} />
        <${Input} label="Actor" hint="The id of a user or API key" required=${false} maxlength="128" class="mono" value=${state.user_id} onInput=${set('user_id')} />
        <${Input} label="Resource" hint="The id of a credential or key" required=${false} maxlength="128" class="mono" value=${state.resource_id} onInput=${set('resource_id')} />
        <${Input} label="From" hint=${zone} required=${false} type="datetime-local" step="1" max="9999-12-31T23:59:59" value=${state.from} onInput=${set('from')} />
        <${Input} label="Until" hint=${zone} required=${false} type="datetime-local" step="1" max="9999-12-31T23:59:59" value=${state.to} onInput=${set('to')}
          error=${backwards && 'This is before the beginning.'} />
      </div>
      <div class="actions"><button type="submit" class="primary">Apply</button><button type="button" onClick=${() => setQuery(Object.fromEntries([...fields, 'show', 'cursor'].map(f => [f, ''])))}>Show all</button></div>
    </form>
  </details>`;
}

const fits = (entry, {event_type: type, category, outcome, user_id: user, resource_id: resource, from}) =>
  (!category || isOf[category](entry.event_type)) && (!type || entry.event_type === type) && (!outcome || entry.outcome === outcome) && (!user || entry.actor.id === user) &&
  (!resource || entry.resource.id === resource) && (!from || new Date(entry.timestamp) >= new Date(from));

// ---- following

// useTail keeps what comes while the log is followed, newest first: {entries, state,
// error, start, pause}. With the first event the list is loaded anew, so that nothing is
// missing between the two.
function useTail(filters, reload) {
  const [entries, setEntries] = useState([]);
  const [state, setState] = useState('off');
  const [error, setError] = useState(null);
  const end = useRef(null), last = useRef(undefined), now = useRef(filters);
  now.current = filters;
  const pause = () => {
    end.current?.();
    end.current = null;
    setState('off');
  };
  const start = () => {
    pause();
    setError(null);
    end.current = follow({
      after: last.current,
      onEntry: entry => {
        if (last.current === undefined) reload();
        last.current = entry.sequence;
        if (fits(entry, now.current)) setEntries(list => [entry, ...list].slice(0, mostRows));
      },
      onState: (name, error) => {
        if (name === 'failed') pause();
        else setState(name);
        setError(error ?? null);
      },
    });
  };
  useEffect(() => () => end.current?.(), []);
  const key = JSON.stringify(filters);
  useEffect(() => setEntries(list => list.filter(e => fits(e, now.current))), [key]);
  return {entries, state, error, start, pause};
}

// Following says what happens, and what came, to a screen reader at most every ten
// seconds.
function Following({live}) {
  const [told, setTold] = useState('');
  const timer = useRef(null), text = useRef('');
  const came = live.entries.length;
  text.current = live.state === 'off' ? '' : came === 0 ? 'No new entry yet' : `${count(came, 'new entry', 'new entries')}${came >= mostRows ? ' or more' : ''}`;
  useEffect(() => {
    timer.current ??= setTimeout(() => { timer.current = null; setTold(text.current); }, told === '' ? 500 : 10_000);
  }, [text.current]);
  useEffect(() => () => clearTimeout(timer.current), []);
  if (live.error) return html`<div class="spaced"><${Trouble} error=${live.error} retry=${live.start} /></div>`;
  if (live.state === 'refused') return html`<p class="notice" role="status">The server has not taken the connection yet: at most 8 pages of an organisation follow the log at once. This page keeps trying.</p>`;
  if (live.state === 'off') return came > 0 && html`<p class="notice">Following is paused. ${count(came, 'entry', 'entries')} came meanwhile.</p>`;
  return html`<p class="row spaced"><${Tag} kind=${live.state === 'open' ? 'good' : 'plain'}>${live.state === 'open' ? 'following' : 'connecting'}<//>
    <span aria-hidden="true">${text.current}</span><span class="unseen" role="status">${told}</span></p>`;
}

// ---- verifying

// useChecks verifies entries, newest first, one after the other: {run, busy, done, all,
// log, verdicts, error}. whole says that none is left out between them, so that one that
// is missing is found.
function useChecks() {
  const [state, setState] = useState({});
  const abort = useRef(null);
  useEffect(() => () => abort.current?.abort(), []);
  const run = async (entries, whole) => {
    abort.current?.abort();
    const {signal} = abort.current = new AbortController();
    const verdicts = new Map();
    const tell = more => { if (!signal.aborted) setState(s => ({...s, ...more, verdicts: new Map(verdicts)})); };
    setState({busy: true, done: 0, all: entries.length});
    try {
      const log = await openLog(Math.max(...entries.map(e => e.sequence)), signal);
      tell({log});
      const before = new Map(entries.map(e => [e.tenant_sequence + 1, e]));
      for (const [i, entry] of entries.entries()) {
        if (signal.aborted) return;
        const previous = entry.tenant_sequence === 1 ? null : before.get(entry.tenant_sequence) ?? (whole ? entries[i + 1] : undefined);
        verdicts.set(entry.sequence, await checkEntry(log, entry, previous, signal));
        tell({done: verdicts.size});
      }
      tell({busy: false});
    } catch (error) {
      tell({busy: false, error: error.name === 'AbortError' ? null : error});
    }
  };
  return {...state, run};
}

const verdictTexts = {good: 'verified', bad: 'does not verify', plain: 'not wholly checked'};

function Verdict({of: checks}) {
  if (!checks) return html`<span class="quiet">not checked</span>`;
  const kind = verdict(checks), wrong = checks.find(c => c.kind === kind && kind !== 'good');
  const link = checks.find(c => c.part === 'link');
  return html`<${Tag} kind=${kind === 'plain' ? 'warn' : kind}>${verdictTexts[kind]}<//>
    ${wrong ? html`<p>${wrong.found}</p>` : link.kind === 'plain' && html`<p class="quiet">but for the link: the entry before is not on this page</p>`}`;
}

function Checks({of: {busy, done, all, log, verdicts, error}}) {
  const box = useRef();
  const over = verdicts && !busy && !error;
  useEffect(() => { if (over) box.current?.focus(); }, [over]);
  if (busy) {
    return html`<div class="panel"><label class="stack tight">Verifying in this browser: ${number(done)} of ${count(all, 'entry', 'entries')}
      <progress value=${done} max=${all}></progress></label></div>`;
  }
  if (error) return html`<div class="spaced"><${Trouble} error=${error} /></div>`;
  if (!verdicts) return '';
  const kinds = [...verdicts.values()].map(verdict);
  const bad = kinds.filter(k => k === 'bad').length, open = kinds.filter(k => k === 'plain').length;
  const links = [...verdicts.values()].filter(cs => cs.find(c => c.part === 'link').kind === 'good').length;
  const checked = verdicts.size, withLink = [...verdicts.values()].filter(cs => cs.find(c => c.part === 'link').kind !== 'plain').length;
  return html`<${Panel} title="Verified in this browser">
    <p tabindex="-1" ref=${box} role="status"><${Tag} kind=${bad > 0 ? 'bad' : open > 0 ? 'warn' : 'good'}>${bad > 0 ? 'not verified' : open > 0 ? 'not all checked' : 'verified'}<//>
      ${' '}${bad > 0 ? `${number(bad)} of ${count(checked, 'entry', 'entries')} ${bad === 1 ? 'fails' : 'fail'} verification. The log, or what the server shows of it, was changed. Keep this page and tell the operator of this service.`
        : `${number(checked - open)} of ${count(checked, 'entry', 'entries')} verified: hash, signature, inclusion. ${number(links)} of ${count(withLink, 'link')} intact.`}</p>
    <details><summary>What this proves</summary><div class="stack">
      <p>Nothing in these entries was changed after it was written, and they are in the log with this fingerprint. Compare it with the one that you were given: the page cannot tell whose log it is.</p>
      <${Facts} of=${[
        ['Checkpoint', html`${count(log.checkpoint.size, 'entry', 'entries')}, signed, of <${Time} at=${log.checkpoint.time} />`],
        ['Root of its tree', html`<${Hash} label="Copy the root">${log.checkpoint.root}<//>`],
      ]} />
      <${Fingerprint} word="Fingerprint of the log" value=${log.fingerprint} hint="From the operator of this service, on a way other than this page." />
    </div></details>
  <//>`;
}
