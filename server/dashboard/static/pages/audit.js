// The audit log of the tenant: read, followed, and verified in the page.
import {html, useEffect, useRef, useState} from '../vendor/preact.js';
import {useAccount} from '../lib/account.js';
import {get, post} from '../lib/api.js';
import {count, deed, number, words} from '../lib/format.js';
import {Actor, Fingerprint, Outcome, Resource, checkEntry, follow, openLog, verdict} from '../lib/log.js';
import {Choice, Empty, Facts, Hash, Input, Link, Loaded, Page, Pages, Panel, Skeleton, Table, Tag, Time, Trouble, setQuery, useHere, useLoad} from '../lib/ui.js';
import {Reviews} from './reviews.js';

// All there are, as the contract lists them.
const eventTypes = `CHAIN_STARTED SEALING_KEY_CREATED SEALING_KEY_LISTED SEALING_KEY_RETIRED SEALING_KEY_RESTORED MANIFEST_RESEALED MANIFEST_CHECKED
  BACKUP_TAKEN KMS_KEY_LISTED KMS_REWRAPPED KMS_KEY_DESTROYED TENANT_CREATED TENANT_LISTED TENANT_ACTIVATED TENANT_LIMITED NAMESPACE_MAPPED
  API_KEY_CREATED API_KEY_APPROVED API_KEY_SUSPENDED API_KEY_LISTED API_KEY_REVOKED CREDENTIAL_SEALED CREDENTIAL_LISTED CREDENTIAL_UNSEALED CREDENTIAL_ROTATED CREDENTIAL_REENCRYPTED CREDENTIAL_DESCRIBED
  CREDENTIAL_VERSION_ENDED CREDENTIAL_DELETED CREDENTIAL_RELEASED CREDENTIAL_ADOPTED KEY_CREATED KEY_LISTED KEY_ROTATED DATA_ENCRYPTED DATA_DECRYPTED DATA_REWRAPPED
  DATA_SIGNED DATA_VERIFIED PUBLIC_KEY_READ USER_REGISTERED USER_SIGNED_IN USER_SIGNED_OUT ACCOUNT_READ SESSION_REFRESHED SESSION_LISTED SESSION_ENDED
  EMAIL_VERIFIED VERIFICATION_REQUESTED PASSWORD_CHANGED PASSWORD_RESET_REQUESTED PASSWORD_RESET MEMBER_LISTED MEMBER_INVITED MEMBER_JOINED
  MEMBER_CHANGED MEMBER_REMOVED INVITATION_REVOKED HISTORY_RULE_LISTED HISTORY_RULE_CHANGED GROUP_LISTED GROUP_CREATED GROUP_CHANGED GROUP_DELETED WEBHOOK_LISTED WEBHOOK_CREATED WEBHOOK_DELETED WEBHOOK_SENT WEBHOOK_FAILED
  SETTINGS_READ SETTINGS_CHANGED POLICY_LISTED POLICY_CREATED POLICY_CHANGED POLICY_DELETED POLICY_BOUND POLICY_UNBOUND ACCESS_CHECKED AUDIT_READ PROOF_READ AUDIT_EXPORTED LOG_ARCHIVED ANCHOR_STARTED ANCHOR_REFUSED ROLLBACK_ACCEPTED STATE_COMMITTED STATE_ROWS_ACCEPTED STATE_ROWS_REMOVED
  METRICS_READ COMPLIANCE_ASSESSED COMPLIANCE_SCORED COMPLIANCE_HISTORY_READ COMPLIANCE_REPORTED INVENTORY_READ DENIALS_ACKNOWLEDGED ACCESS_REVIEWED INVENTORY_REVIEWED REVIEW_NOTE_ERASED NAMES_ERASED RATE_LIMITED ACCESS_REFUSED`.split(/\s+/)
  .map(type => [type, words(type)]).sort(([, a], [, b]) => a.localeCompare(b));

const fields = ['event_type', 'outcome', 'user_id', 'resource_id', 'from', 'to'];
const perPage = 50, mostRows = 200;

const filtersOf = query => Object.fromEntries(fields.map(name => [name, query.get(name) ?? '']));

export function Audit() {
  const account = useAccount();
  const {query} = useHere();
  const filters = filtersOf(query), cursor = query.get('cursor') ?? '';
  const log = useLoad(signal => get('/api/v2/audit/logs', {...filters, cursor, limit: perPage}, signal), [...Object.values(filters), cursor]);
  const live = useTail(filters, log.reload);
  // What is followed is the present: neither an earlier page nor one that ends in the past.
  const present = !cursor && !filters.to;
  useEffect(() => { if (!present) live.pause(); }, [present]);
  const listed = log.data?.entries ?? [], newest = listed[0]?.sequence ?? 0;
  const rows = [...live.entries.filter(e => present && e.sequence > newest), ...listed].slice(0, mostRows);
  const names = useNames(account, rows), checks = useChecks();
  // Without these filters the list has every entry between its first and its last.
  const whole = !['event_type', 'outcome', 'user_id', 'resource_id'].some(name => filters[name]);
  const start = () => {
    if (!present) setQuery({cursor: '', to: ''});
    live.start();
  };
  return html`<${Page} title="Audit log" lead="Everything that was done in your organisation, in the order in which it was done. Each entry is signed, and names the hash of the one before it. Reading is recorded too."
      actions=${html`
        ${live.state === 'off' ? html`<button type="button" onClick=${start}>${live.entries.length > 0 ? 'Go on following' : 'Follow'}</button>`
          : html`<button type="button" onClick=${live.pause}>Pause</button>`}
        <button type="button" class="primary" disabled=${rows.length === 0 || checks.busy || log.loading} onClick=${() => checks.run(rows, whole)}>Verify this page</button>`}>
    <${Reviews} onDone=${log.reload} />
    <${Filters} filters=${filters} />
    <${Following} live=${live} />
    <${Checks} of=${checks} />
    <${Loaded} of=${log} lines=${8}>${({next_cursor: next}) => html`
      ${rows.length === 0 && log.loading ? html`<${Skeleton} lines=${8} />` : rows.length === 0 ? html`<${Empty} title=${next ? 'None so far' : 'No entry fits'}>${next
          ? html`<p>There is none among the newest entries. Older ones have not been looked at yet.</p>`
          : html`<p>Nothing of this kind was done in this time. Widen the filter.</p>`}
        ${Object.values(filters).some(Boolean) && html`<${Link} class="button" to="/audit">Show all<//>`}<//>`
      : html`<${Table} caption="Audit entries, newest first" rowKey="sequence" rows=${rows} rowClass=${e => e.sequence > newest ? 'new' : ''} columns=${columns(account, names, checks.verdicts)} />`}
      <${Pages} next=${next} shown=${count(rows.length, 'entry', 'entries')} />`}<//>
  <//>`;
}

const columns = (account, names, verdicts) => [
  {title: 'Time', class: 'when', cell: e => html`<${Time} at=${e.timestamp} />`},
  {title: 'Event', class: 'whole', cell: e => html`<${Link} to=${'/audit/' + e.sequence}>${deed(e)}<//>`},
  {title: 'Outcome', class: 'fit', cell: e => html`<${Outcome} of=${e.outcome} />`},
  {title: 'Actor', class: 'whole', cell: e => html`<${Actor} of=${e.actor} mine=${account.user?.user_id} name=${names.get(e.actor.id)} />`},
  {title: 'Resource', class: 'whole', cell: e => html`<${Resource} of=${e.resource} name=${names.get(e.resource.id)} />`},
  {title: 'Sequence', class: 'number', cell: e => number(e.sequence)},
  ...(verdicts ? [{title: 'Verified here', class: 'whole', cell: e => html`<${Verdict} of=${verdicts.get(e.sequence)} />`}] : []),
];

// useNames returns the names of the ids in rows, for those who may read them. An id is asked for once.
function useNames(account, rows) {
  const [names, setNames] = useState(new Map()), asked = useRef(new Set());
  useEffect(() => {
    const ids = [...new Set(rows.flatMap(e => [e.actor.id, e.resource.id]))].filter(id => id && !asked.current.has(id)).slice(0, 200);
    if (ids.length === 0 || !account.can('audit:names')) return;
    ids.forEach(id => asked.current.add(id));
    post('/api/v2/audit/names', {ids}).then(
      answer => setNames(known => new Map([...known, ...answer.names.map(n => [n.id, n.name])])),
      () => ids.forEach(id => asked.current.delete(id))); // the ids say enough until the next rows
  }, [rows[0]?.sequence, rows.length]);
  return names;
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
      <div class="actions"><button type="submit" class="primary">Apply</button><button type="button" onClick=${() => setQuery(Object.fromEntries([...fields, 'cursor'].map(f => [f, ''])))}>Show all</button></div>
    </form>
  </details>`;
}

const fits = (entry, {event_type: type, outcome, user_id: user, resource_id: resource, from}) =>
  (!type || entry.event_type === type) && (!outcome || entry.outcome === outcome) && (!user || entry.actor.id === user) &&
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
  const all_ = verdicts.size;
  return html`<${Panel} title="Verified in this browser">
    <p tabindex="-1" ref=${box} role="status"><${Tag} kind=${bad > 0 ? 'bad' : open > 0 ? 'warn' : 'good'}>${bad > 0 ? `${count(bad, 'entry does', 'entries do')} not verify` : open > 0 ? 'not wholly checked' : 'all hold'}<//>
      ${' '}${bad > 0 ? 'The log, or what the server shows of it, was changed. Keep this page and tell whoever operates the service.'
        : `Of ${count(all_, 'entry', 'entries')} the hash, the signature and the place in the signed tree ${open > 0 ? `were checked, but for ${open}` : 'hold'}; ${number(links)} name the hash of the entry before, which is here too.`}</p>
    <${Facts} of=${[
      ['Checkpoint', html`${count(log.checkpoint.size, 'entry', 'entries')}, signed, of <${Time} at=${log.checkpoint.time} />`],
      ['Root of its tree', html`<${Hash} label="Copy the root">${log.checkpoint.root}<//>`],
    ]} />
    <p class="quiet">All of this proves one log: the one with this fingerprint. Whose it is, only the comparison tells.</p>
    <${Fingerprint} word="Fingerprint of the log" value=${log.fingerprint} hint="From the operator of this service, on a way other than this page." />
  <//>`;
}
