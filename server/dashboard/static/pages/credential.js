// One credential: its details, its values when somebody asks for them, its history, and what can be done with it.
import {html, useState} from '../vendor/preact.js';
import {useAccount} from '../lib/account.js';
import {del, gather, get, patch, post, put} from '../lib/api.js';
import {Changes, changesOf, patchOf} from '../lib/changes.js';
import {count, number, visible} from '../lib/format.js';
import {Actor, Outcome} from '../lib/log.js';
import {idsOf, useNames} from '../lib/names.js';
import {Rows, asEnv, fromRows, newRow} from '../lib/rows.js';
import {CopySealed} from '../lib/sealing.js';
import {Brief, Secret, useBriefly} from '../lib/secret.js';
import {Act, Choice, Confirm, Copy, Dialog, Facts, Field, Form, Hash, Input, LastRead, Link, Loaded, Name, Page, Panel, Table, Tag, Time, Trouble, navigate, say, useHere, useLoad} from '../lib/ui.js';
import {changes, deed, words} from '../lib/words.js';
import {State, TTL, Tags, nameError, trialEnded, useRows} from './vault.js';

// The vault answers every failure alike, so that nobody learns which of these it is.
const absent = {403: 'It does not exist, has expired, or your access does not reach it. The vault does not say which of these it is.'};
const absentToWrite = {403: absent[403].replace('has expired,', 'has expired, belongs to a Kubernetes object,')};

const at = (id, more = '') => '/api/v2/vault/' + encodeURIComponent(id) + more;

// The folder that a name is in leads back to the list.
const backTo = name => {
  const folder = name.slice(0, name.lastIndexOf('/') + 1);
  return folder ? {to: '/vault?folder=' + encodeURIComponent(folder), text: folder} : {to: '/vault', text: 'Vault'};
};

export function Credential() {
  const account = useAccount();
  const {id} = useHere().params;
  const known = useLoad(signal => get(at(id, '/metadata'), undefined, signal), [id]);
  const [turn, setTurn] = useState(0); // counts what leaves entries in the audit log
  const c = known.data;
  const done = () => setTurn(n => n + 1);
  const changed = () => {
    known.reload();
    done();
  };
  if (!c) return html`<${Page} title="Credential" back=${{to: '/vault', text: 'Vault'}}><${Loaded} of=${known} texts=${absent} lines=${6}>${() => ''}<//><//>`;
  const writes = account.can('vault:write') && !c.owned;
  return html`<${Page} title=${c.name} name=${c.name} back=${backTo(c.name)}>
    <${Loaded} of=${known} texts=${absent}>${() => html`
      ${c.owned && html`<p class="notice">A Kubernetes object manages this credential, so it is read-only here. Change the object instead. <${Link} to="/cluster">Objects of the cluster<//></p>`}
      <${Values} key=${'values' + c.version} of=${c} writes=${writes} done=${done} changed=${changed} />
      <${Details} of=${c} writes=${writes} changed=${changed} />
      ${writes && html`<${Manage} of=${c} changed=${changed} />`}
      <${Versions} of=${c} writes=${writes} changed=${changed} />
      ${account.can('account:admin') && html`<${Permitted} of=${c} />`}
      ${account.can('audit:read') && html`<${Readers} id=${id} /><${Trail} id=${id} turn=${turn} />`}`}<//>
  <//>`;
}

// ---- details

function Details({of: c, writes, changed}) {
  const account = useAccount();
  const [editing, setEditing] = useState(false);
  return html`<${Panel} title="Details" actions=${writes && account.writes && html`<button type="button" data-offered onClick=${() => setEditing(true)}>Edit details</button>`}>
    <${Facts} of=${[
      ['Description', c.description && html`<span class="lines"><${Name}>${c.description}<//></span>`],
      ['Contact', c.contact && html`<${Name}>${c.contact}<//>`],
      ['Tags', c.tags && html`<${Tags} of=${c.tags} />`],
      ['Type', html`<${Name}>${c.credential_type}<//>`],
      ['Status', html`<${State} of=${c} bare />`],
      ['Version', number(c.version)],
      ['Created', html`<${Time} at=${c.created_at} />`],
      ['Updated', html`<${Time} at=${c.sealed_at} />`],
      [c.status === 'expired' ? 'Expired' : 'Expires', c.never_expires ? 'never' : html`<${Time} at=${c.expires_at} /> <span class="quiet">(<${Time} at=${c.expires_at} relative />)</span>`],
      ['Last read', html`<${LastRead} at=${c.last_read_at} />`],
      ['Managed by', c.owned ? 'a Kubernetes object' : 'Latticekeep'],
      ['Id', html`<${Hash} whole label="Copy the id">${c.credential_id}<//>`],
    ]} />
    ${editing && html`<${EditDetails} of=${c} onClose=${() => setEditing(false)} onDone=${() => { setEditing(false); changed(); }} />`}
  <//>`;
}

function EditDetails({of: c, onClose, onDone}) {
  const [form, setForm] = useState({description: c.description ?? '', contact: c.contact ?? '', tags: (c.tags ?? []).join(', ')});
  const set = name => value => setForm(f => ({...f, [name]: value}));
  const store = async () => {
    await patch(at(c.credential_id, '/details'), {...form, tags: form.tags.split(/[\s,]+/).filter(Boolean)});
    say('The details are saved');
    onDone();
  };
  return html`<${Dialog} title="Edit details" onClose=${onClose}>
    <${Form} onSubmit=${store} submit="Save" cancel=${onClose} texts=${absentToWrite}>
      <${Field} label="Description" hint="What it is for. Not secret." optional>${tied => html`
        <textarea dir="auto" maxlength="1000" value=${form.description} onInput=${e => set('description')(e.target.value)} autofocus ...${tied}></textarea>`}<//>
      <${Input} label="Contact" hint="Whom to ask about it, such as a team." optional maxlength="255" value=${form.contact} onInput=${set('contact')} />
      <${Input} label="Tags" hint="Words by which it is found, with commas or spaces between them." optional value=${form.tags} onInput=${set('tags')} />
    <//>
  <//>`;
}

// ---- values

// Nothing is fetched until somebody asks for it.
function Values({of: c, writes, done, changed}) {
  const account = useAccount();
  const held = useBriefly();
  const [editing, setEditing] = useState(null); // what the editor starts from
  const [sealing, setSealing] = useState(false);
  const read = async () => {
    try {
      return await get(at(c.credential_id));
    } finally {
      done();
    }
  };
  const show = async () => held.keep(await read());
  const edit = async () => {
    try {
      setEditing(await read());
    } catch (error) {
      if (error.status !== 403) throw error;
      setEditing({values: {}, blind: true}); // whoever may only write replaces all values
    }
    held.forget();
  };
  if (c.status === 'expired') {
    return html`<${Panel} title="Values"><p>${c.trashed ? 'The credential is in the trash' : 'The credential has expired'}, so its values cannot be read. ${c.owned ? 'Its object makes the next version.'
      : html`Renew brings it back as it was, until it is erased 28 days after <${Time} at=${c.expires_at} />.`}</p><//>`;
  }
  return html`<${Panel} title="Values">
    ${editing ? html`<${Editor} of=${c} from=${editing} read=${read} close=${() => setEditing(null)} changed=${changed} />` : html`
    <${Brief} of=${held} fetch=${html`<div class="actions"><${Act} kind="primary" data-offered onClick=${show} texts=${absent}>Read values<//>
        ${writes && html`<${Act} data-offered onClick=${edit} disabled=${!account.writes} texts=${absent}>Edit values<//>`}</div>
        <p class="quiet">Reading is recorded in the audit log. Each value stays covered until you show it, and the page forgets all of them after 30 seconds.</p>`}>${found => html`
      ${listOf(found).map(v => html`<${Secret} key=${v.name} ...${v} />`)}
      <div class="actions"><${Copy} text=${() => asEnv(found.values)} label="Copy as .env" /><${Copy} text=${JSON.stringify(found.values, null, 2)} label="Copy as JSON" />
        <button type="button" data-offered onClick=${() => setSealing(true)}>Copy as SealedCredential</button>
        ${writes && html`<${Act} data-offered onClick=${edit} disabled=${!account.writes} texts=${absent}>Edit values<//>`}</div>`}<//>`}
    <${Commands} of=${c} />
    ${sealing && html`<${CopySealed} of=${c} read=${async () => held.value ?? await read()} onClose=${() => setSealing(false)} />`}
  <//>`;
}

const listOf = ({values, binary_values: binary = {}}) => [
  ...Object.entries(values).map(([name, value]) => ({name, value, binary: false})),
  ...Object.entries(binary).map(([name, value]) => ({name, value, binary: true})),
].sort((a, b) => a.name < b.name ? -1 : 1);

// quote is an argument of a POSIX shell.
const quote = text => /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;

// Commands read the credential elsewhere; no value is in them.
function Commands({of: c}) {
  const name = visible(c.name) === c.name && /^[^-=]/.test(c.name) ? c.name : c.credential_id; // what cannot be seen, or looks like an option, is not pasted into shells
  const lines = {
    'Command line': `latticekeep get ${quote(name)}`,
    'Run a program with it': `latticekeep run --env-from ${quote(name)} -- COMMAND`,
    curl: `curl -H "X-API-Key: $LATTICEKEEP_API_KEY" ${quote(`${location.origin}/api/v2/vault/${encodeURIComponent(c.credential_id)}`)}`,
  };
  return html`<details><summary>Use it in a shell or a program</summary><${Facts} of=${Object.entries(lines).map(([word, line]) => [word, html`<span class="hash"><code>${line}</code><${Copy} text=${line} label=${`Copy: ${word}`} small /></span>`])} /></details>`;
}

// Editor changes values, starting from those that are stored. Before anything is stored it shows what would
// change; when somebody else has stored a version meanwhile, it compares with that one.
function Editor({of: c, from, read, close, changed}) {
  const [base, setBase] = useState(from);
  const rows = useRows(() => Object.entries(from.values).map(([key, value]) => newRow(key, value)));
  const [days, setDays] = useState('');
  const [review, setReview] = useState(null);
  const binary = Object.keys(base.binary_values ?? {});
  const look = () => rows.check() && setReview(changesOf(base.values, fromRows(rows.rows)));
  const store = async () => {
    const more = days === '' ? {} : {ttl_days: Number(days)};
    const {version} = base.blind ? await put(at(c.credential_id), {values: fromRows(rows.rows), ...more})
      : await patch(at(c.credential_id), {values: patchOf(review), ...more}, {headers: {'If-Match': base.etag}});
    rows.clear();
    say(`Saved as version ${number(version)}`);
    close();
    changed();
  };
  const compare = async () => {
    const now = await read();
    setBase(now);
    setReview(changesOf(now.values, fromRows(rows.rows)));
  };
  if (review) return html`<${Review} of=${review} version=${(base.version ?? c.version) + 1} blind=${base.blind} back=${() => setReview(null)} store=${store} compare=${compare} />`;
  return html`<${Form} onSubmit=${async () => look()} submit="Review changes" cancel=${close}>
    ${base.blind && html`<p class="notice">You may change this credential and not read it. What you enter takes the place of all its values.</p>`}
    ${binary.length > 0 && html`<p class="quiet">Not text, and kept as they are: ${binary.join(', ')}.</p>`}
    <div ref=${rows.box}><${Rows} rows=${rows.rows} onChange=${rows.setRows} errors=${rows.errors} /></div>
    <div class="narrow"><${TTL} optional value=${days} onInput=${setDays} hint="The lifetime starts again. Leave this empty to keep its length." /></div>
  <//>`;
}

function Review({of, version, blind, back, store, compare}) {
  const [conflict, setConflict] = useState(null);
  const save = async () => {
    setConflict(null);
    try {
      await store();
    } catch (error) {
      if (error.status !== 412) throw error;
      setConflict(error);
    }
  };
  return html`<div class="stack">
    <h3>${of.length === 0 ? 'Nothing is changed' : count(of.length, 'change')}</h3>
    <${Changes} of=${of} />
    ${conflict && html`<div><${Trouble} error=${conflict} texts=${{412: ['Changed meanwhile', 'Somebody stored another version since you opened the editor. Compare your values with it before you save.']}} /></div>`}
    <div class="actions">
      ${conflict ? html`<${Act} kind="primary" onClick=${async () => { await compare(); setConflict(null); }} texts=${absent}>Compare with the newest<//>`
        : of.length > 0 && html`<${Act} kind="primary" onClick=${save} texts=${absentToWrite}>${blind ? 'Replace all values' : `Save as version ${number(version)}`}<//>`}
      <button type="button" onClick=${back}>Back to the editor</button>
    </div>
  </div>`;
}

// ---- what else can be done

function Manage({of: c, changed}) {
  const account = useAccount();
  const [asking, setAsking] = useState('');
  const close = () => setAsking('');
  const expired = c.status === 'expired';
  const stopped = !account.writes ? trialEnded : expired ? 'An expired credential can be renewed or deleted.' : '';
  const reencrypt = async () => {
    const {version} = await post(at('rotate', '/' + encodeURIComponent(c.credential_id)));
    say(`Re-encrypted: version ${number(version)}`);
    changed();
  };
  const renew = async () => {
    const {version} = await post(at(c.credential_id, '/renew'), {});
    say(`Renewed: version ${number(version)}`);
    changed();
  };
  const trash = async () => {
    await post(at(c.credential_id, '/trash'));
    say('The credential is in the trash');
    changed();
  };
  const remove = async () => {
    await del(at(c.credential_id));
    say('The credential is deleted');
    navigate(backTo(c.name).to, {replace: true});
  };
  return html`<${Panel} title="Manage">
    <div class="actions">
      <button type="button" data-offered disabled=${!!stopped} onClick=${() => setAsking('reencrypt')}>Re-encrypt</button>
      <button type="button" data-offered disabled=${!!stopped} onClick=${() => setAsking('rename')}>Rename</button>
      <${Act} data-offered onClick=${renew} disabled=${!account.writes} texts=${absentToWrite}>Renew<//>
      ${!expired && html`<button type="button" data-offered onClick=${() => setAsking('trash')}>Move to trash</button>`}
      <button type="button" class="danger" data-offered onClick=${() => setAsking('delete')}>Delete</button>
    </div>
    ${stopped && html`<p class="hint">${stopped}</p>`}
    ${asking === 'reencrypt' && html`<${Confirm} title="Re-encrypt this credential?" action="Re-encrypt" onClose=${close} onConfirm=${reencrypt} texts=${absentToWrite}>
      <p>The same values are encrypted under new keys, as version ${number(c.version + 1)}. The lifetime starts again. To store new values, use Edit values.</p><//>`}
    ${asking === 'rename' && html`<${Rename} of=${c} onClose=${close} onDone=${() => { close(); changed(); }} />`}
    ${asking === 'trash' && html`<${Confirm} title="Move this credential to the trash?" action="Move to trash" onClose=${close} onConfirm=${trash} texts=${absentToWrite}>
      <p>Programs that read it are refused from now on, and its name is free. You can renew it for 28 days. After that it is erased.</p><//>`}
    ${asking === 'delete' && html`<${Confirm} title="Delete this credential?" action="Delete" typed=${c.name} onClose=${close} onConfirm=${remove} texts=${absentToWrite}>
      <p>Its values, versions and keys are deleted for good. Nobody can bring them back. Programs that read it are refused from now on. The deletion stays in the audit log.</p><//>`}
  <//>`;
}

function Rename({of: c, onClose, onDone}) {
  const [name, setName] = useState(c.name);
  const wrong = nameError(name);
  const rename = async () => {
    if (wrong) return;
    await post(at(c.credential_id, '/rename'), {name});
    say('The credential is renamed');
    onDone();
  };
  return html`<${Dialog} title="Rename" onClose=${onClose}>
    <${Form} onSubmit=${rename} submit="Rename" cancel=${onClose} texts=${absentToWrite}>
      <${Input} label="New name" hint="Programs that read it by its name need the new one. Its id stays." maxlength="255" error=${wrong} value=${name} onInput=${setName} autofocus />
    <//>
  <//>`;
}

// ---- history

function Versions({of: c, writes, changed}) {
  const account = useAccount();
  const versions = useLoad(signal => c.status === 'expired' ? Promise.resolve(null) : get(at(c.credential_id, '/versions'), undefined, signal), [c.credential_id, c.version, c.status]);
  const held = useBriefly();
  const [restoring, setRestoring] = useState(null);
  const compare = async version => {
    const [before, after] = [await get(at(c.credential_id), {version}), await get(at(c.credential_id))];
    held.keep({version, changes: changesOf(before.values, after.values)});
  };
  const restore = async () => {
    const {version} = await post(at(c.credential_id, '/undo'), {version: restoring});
    say(`Restored as version ${number(version)}`);
    changed();
  };
  const kept = v => v.readable && !v.current && v.change;
  return html`<${Panel} title="History"><${Loaded} of=${versions} texts=${absent}>${found => found === null
    ? html`<p class="quiet">The history of an expired credential is shown once it is renewed.</p>`
    : html`<div class="stack"><${Table} caption="Versions of the credential" rowKey="version" rows=${found.versions} columns=${[
      {title: 'Version', cell: v => html`<span>${number(v.version)} ${v.current ? html`<${Tag} kind="good">current<//>` : v.readable && html`<${Tag}>kept<//>`}</span>`},
      {title: 'Change', cell: v => changes[v.change] ?? words(v.change)},
      {title: 'Updated', cell: v => html`<${Time} at=${v.sealed_at} />`},
      {title: 'Expires', cell: v => v.expires_at.startsWith('9999-') ? 'never' : html`<${Time} at=${v.expires_at} />`},
      ...found.versions.some(kept) ? [{title: 'Actions', hidden: true, class: 'fit', cell: v => kept(v) && html`<span class="actions">
        <${Act} onClick=${() => compare(v.version)} aria-label=${`Compare version ${v.version}`} texts=${absent}>Compare<//>
        ${writes && html`<button type="button" disabled=${!account.writes} aria-label=${`Restore version ${v.version}`} onClick=${() => setRestoring(v.version)}>Restore</button>`}</span>`}] : [],
    ]} />
    <${Brief} of=${held}>${({version, changes}) => html`<h3>From version ${number(version)} to the current one</h3><${Changes} of=${changes} />`}<//>
    ${!found.versions.some(kept) && html`<p class="hint">Only the current version can be read. A history rule keeps earlier ones: <code>latticekeep keep 'shop/**' 10</code></p>`}</div>`}<//>
    ${restoring && html`<${Confirm} title=${`Restore version ${number(restoring)}?`} action="Restore" onClose=${() => setRestoring(null)} onConfirm=${restore} texts=${absentToWrite}>
      <p>Its values become version ${number(c.version + 1)}. The current ones stay in the history.</p><//>`}
  <//>`;
}

// ---- access

const verbs = [['read', 'Read'], ['write', 'Write'], ['delete', 'Delete'], ['list', 'List']];

// A ServiceAccount is called by its namespace and name.
const serviceAccount = ({kind, subject}) => kind === 'service_account' ? subject.split(':').slice(-2).join('/') : undefined;

// Permitted says who may reach the path of the credential, when somebody wants to know.
function Permitted({of: c}) {
  const account = useAccount();
  const [verb, setVerb] = useState('read');
  const [subjects, setSubjects] = useState(null);
  const look = async () => setSubjects((await post('/api/v2/access/permitted', {path: c.name, verb})).subjects);
  const choose = chosen => {
    setVerb(chosen);
    setSubjects(null);
  };
  return html`<${Panel} title="Who has access" actions=${html`<${Act} onClick=${look}>${subjects ? 'Show again' : 'Show'}<//>`}>
    <div class="narrow"><${Choice} label="What they do" value=${verb} onInput=${choose} options=${verbs} /></div>
    ${subjects === null ? html`<p class="quiet">By scopes and policies, as they are now. What ServiceAccounts without policies may do, their cluster decides.</p>`
    : subjects.length === 0 ? html`<p>Nobody.</p>`
    : html`<${Table} caption="Who can" rowKey="subject" rows=${subjects} columns=${[
        {title: 'Who', cell: s => html`<${Actor} of=${{type: s.kind, id: s.subject}} mine=${account.user?.user_id} name=${s.name ?? serviceAccount(s)} />`},
        {title: 'Through', cell: s => s.groups ? html`${count(s.groups.length, 'group')}` : s.kind === 'user' ? 'role and policies' : 'scopes and policies'},
      ]} />`}
  <//>`;
}

// ---- the audit log

// Readers says who has read the values, from the newest entries. It asks when somebody wants to know, since
// each look at the log is recorded in it.
function Readers({id}) {
  const account = useAccount();
  const [entries, setEntries] = useState(null);
  const names = useNames(idsOf(entries ?? []));
  const look = async () => setEntries((await gather('/api/v2/audit/logs', 'entries', {resource_id: id, event_type: 'CREDENTIAL_UNSEALED', outcome: 'success', limit: 100})).entries);
  const byActor = Object.values(Object.groupBy(entries ?? [], e => e.actor.type + e.actor.id)).map(list => ({id: list[0].actor.id, actor: list[0].actor, last: list[0].timestamp, reads: list.length}));
  return html`<${Panel} title="Who has read this" actions=${html`<${Act} onClick=${look}>${entries ? 'Look again' : 'Look it up'}<//>`}>
    ${entries === null ? html`<p class="quiet">The people and programs behind the newest 100 reads.</p>`
    : byActor.length === 0 ? html`<p>Nobody has read the values, as far as the log in the database goes.</p>`
    : html`<${Table} caption="Readers" rowKey="id" rows=${byActor} columns=${[
        {title: 'Who', cell: r => html`<${Actor} of=${r.actor} mine=${account.user?.user_id} name=${names.get(r.id)?.name} />`},
        {title: 'Reads', class: 'number', cell: r => number(r.reads)},
        {title: 'Last read', cell: r => html`<${Time} at=${r.last} relative />`},
      ]} />`}
  <//>`;
}

const trailSize = 50;

// Trail is what the audit log has of the credential, newest first. Whoever looks at this
// page leaves entries too: they are left out until somebody asks for them, since they
// would soon hide what was done.
function Trail({id, turn}) {
  const account = useAccount();
  const [all, setAll] = useState(false);
  const [older, setOlder] = useState({turn, entries: []}); // those behind the first page
  const page = (cursor, signal) => gather('/api/v2/audit/logs', 'entries', {resource_id: id, limit: trailSize, cursor}, signal);
  const trail = useLoad(signal => page(undefined, signal), [id, turn]);
  const more = older.turn === turn ? older : {entries: []};
  const found = [...trail.data?.entries ?? [], ...more.entries];
  const names = useNames(idsOf(found));
  return html`<${Panel} title="Activity" actions=${html`<${Link} to=${'/audit?resource_id=' + encodeURIComponent(id)}>In the audit log<//>`}>
    <${Loaded} of=${trail}>${first => {
      const entries = all ? found : found.filter(e => e.event_type !== 'CREDENTIAL_LISTED');
      const next = 'cursor' in more ? more.cursor : first.next_cursor;
      const further = async () => {
        const older = await page(next);
        setOlder({turn, entries: [...more.entries, ...older.entries], cursor: older.next_cursor});
      };
      return html`<div class="stack">
        <div class="check"><input type="checkbox" id="all-entries" checked=${all} onChange=${e => setAll(e.target.checked)} /><label for="all-entries">Include reads of its metadata</label></div>
        ${entries.length > 0 && html`<${Table} caption="Audit entries of this credential" rowKey="sequence" rows=${entries} columns=${[
          {title: 'Time', class: 'when', cell: e => html`<${Time} at=${e.timestamp} />`},
          {title: 'Event', cell: e => html`<${Link} to=${'/audit/' + e.sequence}>${deed(e)}<//>`},
          {title: 'Outcome', class: 'fit', cell: e => html`<${Outcome} of=${e.outcome} />`},
          {title: 'Actor', cell: e => html`<${Actor} of=${e.actor} mine=${account.user?.user_id} name=${names.get(e.actor.id)?.name} />`},
          {title: 'Sequence', class: 'number', cell: e => number(e.sequence)},
        ]} />`}
        <div class="row between"><span class="quiet">${count(entries.length, 'entry', 'entries')}${next ? ', older ones may follow' : ''}</span>
          ${next && html`<span class="actions"><${Act} onClick=${further}>Load older entries<//></span>`}</div>
      </div>`;
    }}<//>
  <//>`;
}
