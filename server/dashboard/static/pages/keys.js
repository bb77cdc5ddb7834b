// Keys: the named ones that encrypt data, the ones that manifests are sealed for, and
// the public ones that signatures are verified with.
import {html, useState} from '../vendor/preact.js';
import {useAccount} from '../lib/account.js';
import {api, get, post} from '../lib/api.js';
import {count, number, visible} from '../lib/format.js';
import {Confirm, Copy, Dialog, Empty, Facts, Form, Hash, Input, Link, Loaded, Name, Page, Pages, Panel, Table, Tag, Time, save, say, useAsked, useHere, useLoad} from '../lib/ui.js';
import {nameError} from './vault.js';

const soon = 7 * 86400e3;

// Due says when a key rotates by itself.
function Due({of: key}) {
  const left = new Date(key.next_rotation_at) - Date.now();
  if (left <= 0) return html`<${Tag} kind="warn">due<//> <span class="quiet">since</span> <${Time} at=${key.next_rotation_at} />`;
  return html`${left < soon && html`<${Tag} kind="warn">due soon<//> `}<${Time} at=${key.next_rotation_at} relative />`;
}

// RotateButton asks, and rotates.
function RotateButton({of: key, done}) {
  const account = useAccount();
  const [asking, setAsking] = useState(false);
  const [all, setAll] = useState(false);
  if (!account.can('keys:write')) return null;
  const rotate = async () => {
    const answer = await post(`/api/v2/keys/${encodeURIComponent(key.key_id)}/rotate`, {re_encrypt_data: all});
    say(`Rotated: version ${number(answer.key.version)}` + (all ? `, ${count(answer.re_encrypted_versions, 'earlier version')} encrypted anew` : ''));
    done();
  };
  return html`<button type="button" data-offered disabled=${!account.writes} title=${account.writes ? undefined : 'Not possible since the trial has ended'} aria-label=${'Rotate ' + visible(key.name)} onClick=${() => { setAll(false); setAsking(true); }}>Rotate</button>
    ${asking && html`<${Confirm} title="Rotate this key?" action="Rotate" onClose=${() => setAsking(false)} onConfirm=${rotate}>
      <p><strong><${Name}>${key.name}<//></strong> gets version ${number(key.version + 1)}, which encrypts from now on. What earlier versions encrypted still decrypts. The time until it rotates by itself starts again.</p>
      <div class="check"><input type="checkbox" id="re-encrypt" aria-describedby="re-encrypt-hint" checked=${all} onChange=${e => setAll(e.target.checked)} /><label for="re-encrypt">Encrypt the key material of all versions anew</label></div>
      <p class="hint" id="re-encrypt-hint">For when a copy of the database may be in wrong hands: the private keys of all versions are encrypted under fresh keys of your organisation, and the old encryption of them is deleted. Data that was encrypted stays with you, so it is not touched; rewrap of version 1 of the interface brings it to the newest version.</p>
    <//>`}`;
}

export function Keys() {
  const account = useAccount();
  return html`<${Page} title="Keys" lead="Private keys never leave the service. What is here says which there are, and when they change.">
    ${account.can('keys:read') && html`<${Named} />`}
    <${Sealing} />
    ${account.can('crypto:verify') && html`<${Signature} />`}
  <//>`;
}

// ---- named keys

function Named() {
  const account = useAccount();
  const {query} = useHere();
  const cursor = query.get('cursor') ?? '';
  const keys = useLoad(signal => get('/api/v2/keys', {limit: 20, cursor}, signal), [cursor]);
  const write = account.can('keys:write');
  const [making, setMaking] = useAsked({create: write && account.writes});
  const create = write && html`<button type="button" class="primary" disabled=${!account.writes} onClick=${() => setMaking(true)}>Create a key</button>`;
  return html`<${Panel} title="Named keys" actions=${create}>
    <p class="quiet">They encrypt data, each application's apart from the others'. A key has versions: the newest encrypts, all of them decrypt. It rotates by itself.</p>
    ${write && !account.writes && html`<p class="hint">Creating and rotating is not possible since the trial has ended.</p>`}
    <${Loaded} of=${keys}>${({keys: list, next_cursor: next}) => list.length === 0 && !cursor
      ? html`<${Empty} title="No named keys yet"><p>The first encryption makes the default key. Create another one for an application that is to have its own.</p><//>`
      : html`<${Table} caption="Named keys and when they rotate" rowKey="key_id" rows=${list} columns=${[
          {title: 'Name', cell: k => html`<span><${Link} to=${'/keys/' + encodeURIComponent(k.key_id)}><${Name}>${k.name}<//><//> ${k.default && html`<${Tag}>default<//>`}</span>`},
          {title: 'Version', class: 'number', cell: k => number(k.version)},
          {title: 'Rotates every', cell: k => count(k.rotation_period, 'day')},
          {title: 'Rotated last', cell: k => html`<${Time} at=${k.rotated_at} relative />`},
          {title: 'Rotates next', cell: k => html`<span><${Due} of=${k} /></span>`},
          ...write ? [{title: 'Actions', hidden: true, class: 'fit', cell: k => html`<${RotateButton} of=${k} done=${keys.reload} />`}] : [],
        ]} /><${Pages} next=${next} shown=${count(list.length, 'key')} />`}<//>
    ${making && html`<${CreateKey} onClose=${() => setMaking(false)} onMade=${() => { setMaking(false); keys.reload(); }} />`}
  <//>`;
}

function CreateKey({onClose, onMade}) {
  const [name, setName] = useState('');
  const [days, setDays] = useState('90');
  const create = async () => {
    if (nameError(name)) return;
    await post('/api/v2/keys', {name, rotation_period: Number(days)});
    say('The key is created');
    onMade();
  };
  return html`<${Dialog} title="Create a key" onClose=${onClose}>
    <${Form} onSubmit=${create} submit="Create" cancel=${onClose}>
      <${Input} label="Name" hint="Which application it is for. Not secret; several keys may have the same one." maxlength="255" error=${nameError(name)} value=${name} onInput=${setName} autofocus />
      <${Input} label="Rotates every, in days" type="number" min="1" max="3650" step="1" inputmode="numeric" hint="Then it gets a new version by itself, again and again." value=${days} onInput=${setDays} />
    <//>
  <//>`;
}

export function Key() {
  const {id} = useHere().params;
  const found = useLoad(signal => get('/api/v2/keys/' + encodeURIComponent(id), undefined, signal), [id]);
  const back = {to: '/keys', text: 'Keys'};
  if (!found.data) return html`<${Page} title="Key" back=${back}><${Loaded} of=${found}>${() => ''}<//><//>`;
  const {key, versions} = found.data;
  return html`<${Page} title=${key.name} name=${key.name} back=${back} actions=${html`<${RotateButton} of=${key} done=${found.reload} />`}>
    <${Loaded} of=${found}>${() => html`
      <${Panel} title="Details"><${Facts} of=${[
        ['Id', html`<${Hash} whole label="Copy the id">${key.key_id}<//>`],
        ['Use', key.default ? 'The default key: it encrypts when no key is named' : 'It encrypts when it is named'],
        ['Algorithm', html`${key.algorithm} <span class="quiet">with HKDF-SHA-512 and AES-256-GCM</span>`],
        ['Version', number(key.version)],
        ['Created', html`<${Time} at=${key.created_at} />`],
        ['Rotates every', count(key.rotation_period, 'day')],
        ['Rotated last', html`<${Time} at=${key.rotated_at} />`],
        ['Rotates next', html`<span><${Due} of=${key} /></span>`],
      ]} /><//>
      <${Panel} title="Versions">
        <${Table} caption="Versions of the key" rowKey="number" rows=${versions} columns=${[
          {title: 'Version', cell: v => number(v.number)},
          {title: 'Created', cell: v => v.created_at ? html`<${Time} at=${v.created_at} />` : html`<span class="quiet">not written down</span>`},
          {title: 'Use', cell: v => html`<span>${v.current ? html`<${Tag} kind="good">encrypts and decrypts<//>` : html`<${Tag}>decrypts<//>`}</span>`},
        ]} />
        ${versions.length < key.version && html`<p class="hint">The newest ${count(versions.length, 'version')} of ${number(key.version)} are shown.</p>`}
      <//>`}<//>
  <//>`;
}

// ---- sealing keys

const uses = {current: ['good', 'seal for this one'], former: ['plain', 'still opens unless it was retired'], unknown: ['bad', 'none of this deployment, so that nothing opens']};

function Sealing() {
  const account = useAccount();
  const current = useLoad(async signal => {
    try {
      const text = await api('GET', '/api/v2/sealing-key', {signal, text: true});
      const {readSealingKey} = await import('../crypto/sealing.js');
      return {text, key: await readSealingKey(text)};
    } catch (error) {
      if (error.status === 404) return {};
      throw error;
    }
  }, []);
  return html`<${Panel} title="Sealing keys">
    <p class="quiet">Values in SealedCredential manifests are encrypted for the current sealing key, so that only this service opens them.</p>
    <${Loaded} of=${current}>${({text, key}) => !key
      ? html`<${Empty} title="No sealing key yet"><p>The service makes the first one when its operator runs in a cluster.</p><//>`
      : html`<div class="stack"><${Facts} of=${[
          ['Current key', html`<${Hash} whole label="Copy the key id">${key.keyID}<//>`],
          ['Suite', key.suite],
          ['Created', html`<${Time} at=${key.createdAt} />`],
          ['Signed by', html`<${Hash} whole label="Copy the identity fingerprint">${key.identity}<//>`],
          ['Signature', html`<span><${Tag} kind="good">verified in this browser<//></span>`],
        ]} />
        <p class="hint">Compare the fingerprint of who signed it with the one that reached you another way: this page alone proves nothing.</p>
        <div class="actions"><button type="button" onClick=${() => save('sealing-key.json', text, 'application/json')}>Download the key file</button>
          ${account.can('vault:read') && html`<${Link} class="button" to="/cluster/seal">Seal a manifest<//>`}</div></div>`}<//>
    ${account.can('vault:read') && html`<${Uses} />`}
  <//>`;
}

// Uses is how many objects of the cluster need which key.
function Uses() {
  const found = useLoad(signal => get('/api/v2/cluster/sealed-credentials', {limit: 1}, signal), []);
  return html`<h3>Objects by key</h3><${Loaded} of=${found} texts=${{503: 'The operator does not know all objects yet. Try again after a while.'}}>${({operator, sealing_keys: keys}) => !operator
    ? html`<p class="quiet">No operator runs in this deployment, so there are no objects to count.</p>`
    : keys.length === 0 ? html`<p class="quiet">No object needs a sealing key yet.</p>`
    : html`<div class="stack"><${Table} caption="Objects by sealing key" rowKey="key_id" rows=${keys} columns=${[
        {title: 'Key', cell: k => html`<${Hash} label="Copy the key id">${k.key_id}<//>`},
        {title: 'State', cell: k => { const [kind, text] = uses[k.state] ?? ['plain', '']; return html`<span><${Tag} kind=${kind}>${k.state === 'former' ? 'previous' : k.state}<//> <span class="quiet">${text}</span></span>`; }},
        {title: 'Your objects', class: 'number', cell: k => count(k.objects, 'object')},
      ]} />
      ${keys.some(k => k.state !== 'current' && k.objects > 0) && html`<p class="hint">Objects that are sealed for a previous key have to be sealed again before it is retired: <code>latticekeep reseal</code> does that with a manifest.</p>`}</div>`}<//>`;
}

// ---- signature keys

function Signature() {
  const found = useLoad(signal => get('/api/v2/encryption/public-key', undefined, signal), []);
  const file = jwk => JSON.stringify(jwk, null, 2) + '\n';
  return html`<${Panel} title="Public signature keys" actions=${found.data?.keys.length > 1 && html`<button type="button" onClick=${() => save('signature-keys.json', file({keys: found.data.keys}), 'application/json')}>Download all</button>`}>
    <p class="quiet">With them anybody verifies the ML-DSA-65 signatures of your organisation, without this service. They are JSON Web Keys (RFC 9964).</p>
    <${Loaded} of=${found}>${({keys}) => keys.length === 0
      ? html`<${Empty} title="No signature key yet"><p>The first signature makes one.</p><//>`
      : html`<${Table} caption="Signature keys, the newest first" rowKey="kid" rows=${keys} columns=${[
          {title: 'Key id', cell: k => html`<${Hash} label="Copy the key id">${k.kid}<//>`},
          {title: 'Algorithm', cell: k => k.alg},
          {title: 'Order', cell: k => k === keys[0] ? html`<span><${Tag} kind="good">newest<//></span>` : 'earlier'},
          {title: 'Actions', hidden: true, class: 'fit', cell: k => html`<span class="actions"><${Copy} text=${file(k)} label="Copy as JWK" />
            <button type="button" aria-label=${'Download the key ' + k.kid.slice(0, 8)} onClick=${() => save(`signature-key-${k.kid.slice(0, 8)}.json`, file(k), 'application/json')}>Download</button></span>`},
        ]} />`}<//>
  <//>`;
}
