// One credential: what is known of it, its values when they are asked for, and what
// can be done with it.
import {html, useState} from '../vendor/preact.js';
import {useAccount} from '../lib/account.js';
import {del, gather, get, post, put} from '../lib/api.js';
import {count, deed, number, words} from '../lib/format.js';
import {Actor, Outcome} from '../lib/log.js';
import {Rows, fromRows} from '../lib/rows.js';
import {Brief, Secret, useBriefly} from '../lib/secret.js';
import {Act, Confirm, Facts, Form, Hash, Link, Loaded, Name, Page, Panel, Table, Tag, Time, navigate, say, useHere, useLoad} from '../lib/ui.js';
import {Owner, State, TTL, trialEnded, useRows} from './vault.js';

// The vault answers every failure alike, so that nobody learns which of these it is.
const absent = {403: 'It may not exist, have been deleted, have expired, belong to somebody else, or your role does not allow this. The vault does not say which of these it is. Look for it in the list.'};
const absentToWrite = {403: absent[403] + ' What a Kubernetes object owns is read-only here, which is answered alike.'};

const back = {to: '/vault', text: 'Vault'};
const at = (id, more = '') => '/api/v2/vault/' + encodeURIComponent(id) + more;

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
  if (!c) return html`<${Page} title="Credential" back=${back}><${Loaded} of=${known} texts=${absent} lines=${6}>${() => ''}<//><//>`;
  return html`<${Page} title=${c.name} name=${c.name} back=${back}>
    <${Loaded} of=${known} texts=${absent}>${() => html`
      ${c.owned && html`<p class="notice">An object of a Kubernetes cluster governs this credential, so that it is read-only here. Change the object, and the operator changes the credential. <${Link} to="/cluster">Objects of the cluster<//></p>`}
      <${Panel} title="What is known"><${Facts} of=${[
        ['Id', html`<${Hash} whole label="Copy the id">${c.credential_id}<//>`],
        ['Type', html`<${Name}>${c.credential_type}<//>`],
        ['State', html`<${State} of=${c} bare />`],
        ['Version', number(c.version)],
        ['Sealed first', html`<${Time} at=${c.created_at} />`],
        ['This version encrypted', html`<${Time} at=${c.sealed_at} />`],
        [c.status === 'expired' ? 'Expired' : 'Expires', c.never_expires ? 'never' : html`<${Time} at=${c.expires_at} /> <span class="quiet">(<${Time} at=${c.expires_at} relative />)</span>`],
        ['Owner', html`<span><${Owner} of=${c} />${c.owned && html` <span class="quiet">read-only here</span>`}</span>`],
      ]} /><//>
      <${Unseal} key=${'unseal' + c.version} of=${c} done=${done} />
      ${account.can('vault:write') && !c.owned && html`<${Change} of=${c} changed=${changed} />`}
      <${Versions} of=${c} />
      ${account.can('audit:read') && html`<${Trail} id=${id} turn=${turn} />`}`}<//>
  <//>`;
}

// Unseal fetches nothing until it is asked to.
function Unseal({of: c, done}) {
  const held = useBriefly();
  const unseal = async () => {
    try {
      const {values, binary_values: binary = {}} = await get(at(c.credential_id));
      const byKey = (a, b) => a.name < b.name ? -1 : 1;
      held.keep([
        ...Object.entries(values).map(([name, value]) => ({name, value, binary: false})),
        ...Object.entries(binary).map(([name, value]) => ({name, value, binary: true})),
      ].sort(byKey));
    } finally {
      done();
    }
  };
  return html`<${Panel} title="Values">
    ${c.status === 'expired' ? html`<p>${c.trashed ? 'The credential is in the trash' : 'The credential has expired'}: its values cannot be read. ${c.owned ? 'Its object makes the next version.' : html`Renewed, it is as it was. 28 days after <${Time} at=${c.expires_at} /> it is erased.`}</p>` : html`
    <${Brief} of=${held} fetch=${html`<p class="quiet">Nothing secret is on this page yet. Unsealing fetches the values, which is recorded in the audit log; each stays covered until you show it, and the page forgets all of them after 30 seconds.</p>
      <div class="actions"><${Act} onClick=${unseal} texts=${absent}>Unseal<//></div>`}>${list => html`
      ${list.map(v => html`<${Secret} key=${v.name} ...${v} />`)}`}<//>`}
  <//>`;
}

// Change is what can be done with a credential that no object owns.
function Change({of: c, changed}) {
  const account = useAccount();
  const [asking, setAsking] = useState('');
  const close = () => setAsking('');
  const expired = c.status === 'expired';
  const stopped = !account.writes ? trialEnded : expired ? 'An expired credential can be renewed and deleted.' : '';
  const rotate = async () => {
    const {version} = await post(at('rotate', '/' + encodeURIComponent(c.credential_id)));
    say(`Rotated: version ${number(version)}`);
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
    navigate('/vault', {replace: true});
  };
  return html`<${Panel} title="Change">
    <div class="actions">
      <button type="button" disabled=${!!stopped} aria-expanded=${asking === 'replace'} onClick=${() => setAsking(asking === 'replace' ? '' : 'replace')}>Replace the values</button>
      <button type="button" disabled=${!!stopped} onClick=${() => setAsking('rotate')}>Rotate</button>
      ${expired
        ? html`<${Act} onClick=${renew} disabled=${!account.writes} texts=${{...absentToWrite, 409: 'Another credential has its name by now. Delete or rename that one first.'}}>Renew<//>`
        : html`<button type="button" onClick=${() => setAsking('trash')}>Put in the trash</button>`}
      <button type="button" class="danger" onClick=${() => setAsking('delete')}>Delete</button>
    </div>
    ${stopped && html`<p class="hint">${stopped}</p>`}
    ${asking === 'replace' && html`<${Replace} of=${c} close=${close} changed=${changed} />`}
    ${asking === 'rotate' && html`<${Confirm} title="Rotate this credential?" action="Rotate" onClose=${close} onConfirm=${rotate} texts=${absentToWrite}>
      <p>The same values are encrypted anew under a new ML-KEM-768 key pair, as version ${number(c.version + 1)}. The old ciphertext is deleted, and the lifetime starts again.</p>
      <p>The values themselves stay as they are: to get new ones, change them where they are used, then replace them here.</p><//>`}
    ${asking === 'trash' && html`<${Confirm} title="Put this credential in the trash?" action="Put in the trash" onClose=${close} onConfirm=${trash} texts=${absentToWrite}>
      <p>Programs that read the credential are refused from now on, and its name is free. For 28 days you can renew it here. After that it is erased.</p><//>`}
    ${asking === 'delete' && html`<${Confirm} title="Delete this credential?" action="Delete" typed=${c.name} onClose=${close} onConfirm=${remove} texts=${absentToWrite}>
      <p>The ciphertext and its keys are deleted for good: nobody can bring the values back. Programs that read the credential are refused from now on. The deletion stays in the audit log.</p><//>`}
  <//>`;
}

function Replace({of: c, close, changed}) {
  const rows = useRows();
  const [days, setDays] = useState('');
  const replace = async () => {
    if (!rows.check()) return;
    const {version} = await put(at(c.credential_id), {values: fromRows(rows.rows), ttl_days: days === '' ? undefined : Number(days)});
    rows.clear();
    say(`Replaced: version ${number(version)}`);
    close();
    changed();
  };
  return html`<${Form} onSubmit=${replace} submit=${`Store as version ${number(c.version + 1)}`} cancel=${close} texts=${absentToWrite}>
    <h3>New values</h3>
    <p>They take the place of all values that there are: a key that is not entered here is gone. The old ciphertext is deleted.</p>
    <div ref=${rows.box}><${Rows} rows=${rows.rows} onChange=${rows.setRows} errors=${rows.errors} /></div>
    <div class="narrow"><${TTL} optional value=${days} onInput=${setDays} hint="The lifetime starts again; if this is empty, with as many days as the credential had." /></div>
  <//>`;
}

const changes = {sealed: 'first sealed', rotated: 'new values', reencrypted: 'same values under new keys'};

function Versions({of: c}) {
  const versions = useLoad(signal => c.status === 'expired' ? Promise.resolve(null) : get(at(c.credential_id, '/versions'), undefined, signal), [c.credential_id, c.version, c.status]);
  return html`<${Panel} title="Versions"><${Loaded} of=${versions} texts=${absent}>${found => found === null
    ? html`<p class="quiet">The versions of an expired credential are not told.</p>`
    : html`<div class="stack"><${Table} caption="Versions of the credential" rowKey="version" rows=${found.versions} columns=${[
      {title: 'Version', cell: v => html`<span>${number(v.version)} ${v.current && html`<${Tag} kind="good">current<//>`}</span>`},
      {title: 'What made it', cell: v => changes[v.change] ?? words(v.change)},
      {title: 'Encrypted', cell: v => html`<${Time} at=${v.sealed_at} />`},
      {title: 'Lifetime until', cell: v => v.expires_at.startsWith('9999-') ? 'never ends' : html`<${Time} at=${v.expires_at} />`},
    ]} /><p class="hint">Only the current version can be unsealed. The ciphertext of earlier ones is gone.</p></div>`}<//><//>`;
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
  return html`<${Panel} title="Audit trail" actions=${html`<${Link} to=${'/audit?resource_id=' + encodeURIComponent(id)}>In the audit log<//>`}>
    <${Loaded} of=${trail}>${first => {
      const found = [...first.entries, ...more.entries];
      const entries = all ? found : found.filter(e => e.event_type !== 'CREDENTIAL_LISTED');
      const next = 'cursor' in more ? more.cursor : first.next_cursor;
      const further = async () => {
        const older = await page(next);
        setOlder({turn, entries: [...more.entries, ...older.entries], cursor: older.next_cursor});
      };
      return html`<div class="stack">
        <div class="check"><input type="checkbox" id="all-entries" checked=${all} onChange=${e => setAll(e.target.checked)} /><label for="all-entries">Show also when its metadata was read</label></div>
        ${entries.length > 0 && html`<${Table} caption="Audit entries of this credential" rowKey="sequence" rows=${entries} columns=${[
          {title: 'When', cell: e => html`<${Time} at=${e.timestamp} />`},
          {title: 'Event', cell: e => html`<${Link} to=${'/audit/' + e.sequence}>${deed(e)}<//>`},
          {title: 'Outcome', cell: e => html`<${Outcome} of=${e.outcome} />`},
          {title: 'Actor', cell: e => html`<${Actor} of=${e.actor} mine=${account.user?.user_id} />`},
          {title: 'Entry', class: 'number', cell: e => number(e.sequence)},
        ]} />`}
        <div class="row between"><span class="quiet">${count(entries.length, 'entry', 'entries')}${next ? ', older ones may follow' : ''}</span>
          ${next && html`<span class="actions"><${Act} onClick=${further}>Look for older ones<//></span>`}</div>
      </div>`;
    }}<//>
  <//>`;
}
