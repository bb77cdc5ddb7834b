// Keys by which programs sign in.
import {html, useState} from '../../vendor/preact.js';
import {unverified, useAccount} from '../../lib/account.js';
import {del, post} from '../../lib/api.js';
import {visible} from '../../lib/format.js';
import {Narrowed} from '../../lib/list.js';
import {loadAccess, said} from '../../lib/subjects.js';
import {scopes} from '../../lib/words.js';
import {Address, Choice, Confirm, Copy, Dialog, Empty, Form, Hash, Input, Loaded, Name, Panel, Table, Tag, Time, say, useAsked, useLoad} from '../../lib/ui.js';

export function APIKeys() {
  const account = useAccount();
  const keys = useLoad(loadAccess, []);
  const [making, setMaking] = useAsked({create: account.writes});
  const [made, setMade] = useState(null);
  const [revoking, setRevoking] = useState(null);
  const [approving, setApproving] = useState(null);
  return html`<${Panel} title="Keys for programs" actions=${html`<button type="button" class="primary" disabled=${!account.writes} onClick=${() => setMaking(true)}>Create an API key</button>`}>
    <p class="quiet">A key is sent in the header <code>X-API-Key</code>, for version 1 of the interface as <code>Authorization: Bearer</code>. It is shown once. Store it securely and keep it out of version control.</p>
    ${!account.writes && html`<p class="hint">Creating one is not possible since the trial has ended.</p>`}
    <${Loaded} of=${keys}>${a => a.keys.length === 0
      ? html`<${Empty} title="No API keys yet"><p>Create one for each program, with the scopes that it needs and no more.</p><//>`
      : html`<${Narrowed} rows=${a.keys} label="Find an API key" textOf=${k => [k.name, k.key_id, ...k.scopes, a.of(k.created_by).name ?? '', ...(policiesOf(a, k) ?? []).map(a.policyName)].join('\n')}>${rows => html`<${Table} caption="API keys" rowKey="key_id" rows=${rows} columns=${[
          {title: 'Name', class: 'whole', cell: k => html`<span><${Name}>${k.name}<//></span> <${Hash} label="Copy the id">${k.key_id}<//>`},
          {title: 'Scopes', class: 'once', cell: k => html`<ul class="plain">${k.scopes.map(s => html`<li key=${s}><code>${s}</code></li>`)}</ul>`},
          {title: 'Policies', cell: k => html`<${Policies} of=${policiesOf(a, k)} name=${a.policyName} />`},
          {title: 'Created', class: 'words', cell: k => html`<span><${Time} at=${k.created_at} relative /></span> <span class="quiet">by <${Address}>${said(a.of(k.created_by))}<//></span>`},
          {title: 'Last used', class: 'once', cell: k => html`<${Time} at=${k.last_used_at} relative />`},
          {title: 'Expires', class: 'once', cell: k => k.status === 'expired' ? html`<${Tag} kind="bad">expired<//>` : k.status === 'pending' ? html`<${Tag} kind="warn">waits for approval<//>` : html`<${Time} at=${k.expires_at} relative />`},
          {title: 'Actions', hidden: true, class: 'fit', cell: k => html`<span class="actions">${k.status === 'pending' && account.user?.role === 'owner' && html`<button type="button" aria-label=${'Approve ' + visible(k.name)} onClick=${() => setApproving(k)}>Approve</button>`}
            <button type="button" class="danger" aria-label=${'Revoke ' + visible(k.name)} onClick=${() => setRevoking(k)}>Revoke</button></span>`},
        ]} />`}<//>`}<//>
    ${making && html`<${CreateKey} onClose=${() => setMaking(false)} onMade=${key => { setMaking(false); setMade(key); keys.reload(); }} />`}
    ${made && html`<${MadeKey} made=${made} onClose=${() => setMade(null)} />`}
    ${approving && html`<${Confirm} title="Approve this API key?" action="Approve" onClose=${() => setApproving(null)} texts=${unverified(account)} onConfirm=${async () => {
        await post('/api/v2/api-keys/' + encodeURIComponent(approving.key_id) + '/approve');
        say('The key is approved');
        keys.reload();
      }}><p>The operator of this service made <${Name}>${approving.name}<//>. Whoever holds it may use: ${approving.scopes.map(s => scopes[s] ?? s).join(', ')}. It ${approving.expires_at ? html`expires <${Time} at=${approving.expires_at} />` : 'never expires'}. You answer for it from now on, as for a key of your own.</p><//>`}
    ${revoking && html`<${Confirm} title="Revoke this API key?" action="Revoke" onClose=${() => setRevoking(null)} onConfirm=${async () => {
        await del('/api/v2/api-keys/' + encodeURIComponent(revoking.key_id));
        say('The key is revoked');
        keys.reload();
      }}><p>Programs that use <${Name}>${revoking.name}<//> are refused from now on. This cannot be undone.</p><//>`}
  <//>`;
}

// policiesOf returns the ids of the policies of a key's own binding, or undefined if it has none.
const policiesOf = (access, key) => access.bindings.find(b => b.subject === key.key_id)?.policies;

const Policies = ({of, name}) => !of ? html`<span class="quiet" title="The key has the limits of whoever answers for it">none of its own</span>`
  : of.length === 0 ? html`<${Tag} kind="warn">no path is allowed<//>` : html`<ul class="plain">${of.map(id => html`<li key=${id}><${Name}>${name(id)}<//></li>`)}</ul>`;

function CreateKey({onClose, onMade}) {
  const account = useAccount();
  const offered = Object.keys(scopes).filter(account.can);
  const [name, setName] = useState('');
  const [days, setDays] = useState('90');
  const [chosen, setChosen] = useState(['vault:read']);
  const [wrong, setWrong] = useState('');
  const create = async () => {
    if (chosen.length === 0) {
      setWrong('Choose at least one scope.');
      return;
    }
    onMade(await post('/api/v2/api-keys', {name, scopes: chosen, expires_in_days: days === '' ? undefined : Number(days)}));
  };
  const toggle = scope => {
    setWrong('');
    setChosen(chosen.includes(scope) ? chosen.filter(s => s !== scope) : [...chosen, scope]);
  };
  return html`<${Dialog} title="Create an API key" onClose=${onClose}>
    <${Form} onSubmit=${create} submit="Create" cancel=${onClose} texts=${unverified(account)}>
      <${Input} label="Name" hint="Which program it is for." maxlength="255" value=${name} onInput=${setName} autofocus />
      <fieldset aria-describedby=${wrong ? 'scopes-wrong' : undefined}><legend>Scopes</legend>${offered.map(scope => html`
        <div class="check" key=${scope}><input type="checkbox" id=${'scope-' + scope} checked=${chosen.includes(scope)} onChange=${() => toggle(scope)} />
          <label for=${'scope-' + scope}>${scopes[scope]} <code class="quiet">${scope}</code></label></div>`)}
        ${wrong && html`<p class="wrong" id="scopes-wrong" role="alert">${wrong}</p>`}
      </fieldset>
      <${Choice} label="Expires" value=${days} onInput=${setDays} options=${[['30', 'in 30 days'], ['90', 'in 90 days'], ['365', 'in 365 days'], ['', 'never']]} />
    <//>
  <//>`;
}

// MadeKey shows a key for the only time, so that only its button closes it.
function MadeKey({made, onClose}) {
  const curl = key => `curl -H 'X-API-Key: ${key}' ${location.origin}/api/v2/auth/me`;
  return html`<${Dialog} title="Your new API key" onClose=${onClose} fixed>
    <div class="stack">
      <p>This is the only time that the key is shown. Copy it now to where your program finds it.</p>
      <code class="secret" data-testid="api-key">${made.api_key}</code>
      <div class="actions"><${Copy} text=${made.api_key} label="Copy the key" /><${Copy} text=${() => curl(made.api_key)} label="Copy a curl line" /></div>
      <pre>${curl('…')}</pre>
      <div class="actions"><button type="button" class="primary" onClick=${onClose}>I have stored it</button></div>
    </div>
  <//>`;
}
