// Rules of the organisation: how many versions are kept, where credentials may never expire, and how long past names are kept.
import {html, useState} from '../../vendor/preact.js';
import {useAccount} from '../../lib/account.js';
import {api, get, patch, put} from '../../lib/api.js';
import {count, number, visible} from '../../lib/format.js';
import {Narrowed} from '../../lib/list.js';
import {Act, Confirm, Dialog, Empty, Form, Input, Loaded, Name, Panel, Table, say, useAsked, useLoad} from '../../lib/ui.js';

const rulesAt = '/api/v2/vault/history-rules', settingsAt = '/api/v2/settings';
const limited = {403: ['Your policies do not allow this', 'These rules are about all paths of the organisation. Only somebody whom no policy limits sees and changes them.']};
const globs = html`<code>shop/prod/db</code> is one path, <code>shop/*/db</code> has any segment in the place of <code>*</code>, and <code>shop/**</code> is all below <code>shop/</code>.`;

export function Rules() {
  return html`<${History} /><${Tenant} />`;
}

// ---- kept versions

function History() {
  const account = useAccount();
  const rules = useLoad(signal => get(rulesAt, undefined, signal), []);
  const [editing, setEditing] = useAsked({create: account.writes && {path: '', versions_kept: 5}});
  const [removing, setRemoving] = useState(null);
  const done = message => {
    setEditing(null);
    say(message);
    rules.reload();
  };
  return html`<${Panel} title="Kept versions" actions=${html`<button type="button" class="primary" disabled=${!account.writes} onClick=${() => setEditing({path: '', versions_kept: 5})}>Create a rule</button>`}>
    <p class="quiet">A new value erases the one before, unless a rule keeps earlier versions. Of the rules that match a path the most specific one counts.</p>
    <${Loaded} of=${rules} texts=${limited}>${({rules: list}) => list.length === 0
      ? html`<${Empty} title="No rules yet"><p>No earlier version is kept.</p><//>`
      : html`<${Narrowed} rows=${list} label="Find a rule" textOf=${r => r.path}>${rows => html`<${Table} caption="Rules of the history" rowKey="path" rows=${rows} columns=${[
          {title: 'Path', cell: r => html`<code><${Name}>${r.path}<//></code>`},
          {title: 'Earlier versions kept', cell: r => r.versions_kept === 0 ? 'none' : number(r.versions_kept)},
          {title: 'Actions', hidden: true, class: 'fit', cell: r => html`<span class="actions">
            <button type="button" disabled=${!account.writes} aria-label=${'Change the rule of ' + visible(r.path)} onClick=${() => setEditing(r)}>Change</button>
            <button type="button" class="danger" aria-label=${'Remove the rule of ' + visible(r.path)} onClick=${() => setRemoving(r)}>Remove</button></span>`},
        ]} />`}<//>`}<//>
    ${editing && html`<${EditRule} of=${editing} isNew=${!rules.data?.rules.includes(editing)} onClose=${() => setEditing(null)} onDone=${done} />`}
    ${removing && html`<${Confirm} title="Remove this rule?" action="Remove" onClose=${() => setRemoving(null)} onConfirm=${async () => {
        await api('DELETE', rulesAt, {query: {path: removing.path}});
        done('The rule is removed');
      }}><p>The next rule that matches counts for <code><${Name}>${removing.path}<//></code>. Versions that it does not keep are <strong>erased at once</strong>. This cannot be undone.</p><//>`}
  <//>`;
}

function EditRule({of, isNew, onClose, onDone}) {
  const [path, setPath] = useState(of.path);
  const [kept, setKept] = useState(String(of.versions_kept));
  const less = !isNew && Number(kept) < of.versions_kept;
  return html`<${Dialog} title=${isNew ? 'Create a rule' : 'Change a rule'} onClose=${onClose}>
    <${Form} submit=${isNew ? 'Create' : 'Change'} kind=${less ? 'danger' : 'primary'} cancel=${onClose} onSubmit=${async () => {
      await put(rulesAt, {path, versions_kept: Number(kept)});
      onDone(isNew ? 'The rule is created' : 'The rule is changed');
    }}>
      ${isNew ? html`<${Input} label="Path" class="mono" autocapitalize="none" maxlength="255" placeholder="shop/**" hint=${globs} value=${path} onInput=${setPath} autofocus />` : html`<p>Path <code><${Name}>${path}<//></code></p>`}
      <${Input} label="Earlier versions kept" type="number" min="0" max="20" hint="From 0 to 20. They can be read, and gone back to." value=${kept} onInput=${setKept} />
      ${(less || isNew) && html`<p class="notice">${isNew ? 'Where another rule keeps more on these paths now, versions beyond this number are erased at once.' : 'Versions beyond this number are erased at once. This cannot be undone.'}</p>`}
    <//>
  <//>`;
}

// ---- settings

function Tenant() {
  const account = useAccount();
  const settings = useLoad(signal => get(settingsAt, undefined, signal), []);
  const change = async (fields, message) => {
    settings.set(await patch(settingsAt, fields));
    say(message);
  };
  return html`<${Loaded} of=${settings} texts=${limited}>${s => html`
    <${Panel} title="Paths on which credentials may never expire">
      <p class="quiet">Everywhere else, every credential expires. A path that is taken away changes no credential that is there.</p>
      ${s.never_expires_paths.length === 0 ? html`<p>None: every credential expires.</p>`
      : html`<ul class="list">${s.never_expires_paths.map(path => html`<li key=${path}><code><${Name}>${path}<//></code>
          <${Act} disabled=${!account.writes} kind="danger" aria-label=${'Take away ' + visible(path)} onClick=${() => change({never_expires_paths: s.never_expires_paths.filter(p => p !== path)}, 'The path is taken away')}>Take away<//></li>`)}</ul>`}
      <${AddPath} of=${s} change=${change} writes=${account.writes} />
    <//>
    <${Panel} title="Past names">
      <${KeptNames} key=${s.names_kept_days} of=${s} change=${change} writes=${account.writes} />
    <//>`}<//>`;
}

function AddPath({of, change, writes}) {
  const [path, setPath] = useState('');
  const add = async () => {
    await change({never_expires_paths: [...of.never_expires_paths, path]}, 'The path is added');
    setPath('');
  };
  return html`<div class="narrow"><${Form} onSubmit=${add} submit="Add">
    <${Input} label="Add a path" class="mono" autocapitalize="none" maxlength="255" placeholder="ci/**" hint=${globs} disabled=${!writes} value=${path} onInput=${setPath} />
  <//></div>`;
}

function KeptNames({of, change, writes}) {
  const [days, setDays] = useState(String(of.names_kept_days));
  const less = Number(days) < of.names_kept_days;
  return html`<div class="narrow"><${Form} submit="Save" kind=${less ? 'danger' : 'primary'} onSubmit=${() => change({names_kept_days: Number(days)}, 'The setting is saved')}>
    <${Input} label="Days for which past names are kept" type="number" min="0" max="3650" disabled=${!writes} value=${days} onInput=${setDays}
      hint="For readers of the audit log: what a credential was called that is deleted or has another name. 0 keeps none." />
    ${less && html`<p class="notice">Names that are older than ${count(Number(days), 'day')} are told no more at once, and erased within minutes. This cannot be undone.</p>`}
  <//></div>`;
}
