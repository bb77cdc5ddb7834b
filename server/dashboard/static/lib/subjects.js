// Whom policies are bound to, by name: users, API keys, groups and ServiceAccounts.
import {html} from '../vendor/preact.js';
import {get} from './api.js';
import {visible} from './format.js';
import {Address, Choice, Hash, Input} from './ui.js';

const serviceAccount = 'system:serviceaccount:';

// loadAccess reads the policies, the bindings, and who there is: {policies, bindings, groups, members, keys, of(id)}.
// of returns {id, kind, name} of a subject; one that is gone has no name.
export async function loadAccess(signal) {
  const [access, {groups}, {members}, {api_keys: keys}] = await Promise.all(
    ['access/policies', 'groups', 'members', 'api-keys'].map(path => get('/api/v2/' + path, undefined, signal)));
  const known = new Map([
    ...members.map(m => [m.user_id, {id: m.user_id, kind: 'user', name: m.email}]),
    ...keys.map(k => [k.key_id, {id: k.key_id, kind: 'API key', name: k.name}]),
    ...groups.map(g => [g.group_id, {id: g.group_id, kind: 'group', name: g.name}]),
  ]);
  const kinds = {usr: 'user', key: 'API key', grp: 'group'};
  const of = id => known.get(id) ?? (id.startsWith(serviceAccount)
    ? {id, kind: 'ServiceAccount', name: id.slice(serviceAccount.length).replace(':', '/')} : {id, kind: kinds[id.slice(0, 3)] ?? 'caller'});
  const named = new Map(access.policies.map(p => [p.policy_id, p.name]));
  const policies = access.policies, bindings = access.bindings;
  return {policies, bindings, groups, members, keys, of, policyName: id => named.get(id) ?? id};
}

// Subject shows what loadAccess has of one.
export const Subject = ({of}) => html`<span><span class="quiet">${of.kind}</span> ${of.name === undefined ? html`<${Hash}>${of.id}<//>` : html`<${Address}>${of.name}<//>`}</span>`;

// said is a subject in a sentence, and for labels.
export const said = of => visible(of.name ?? of.id);

const kindNames = [['user', 'User'], ['API key', 'API key'], ['group', 'Group'], ['ServiceAccount', 'ServiceAccount']];

// subjectsOf returns who there is of a kind, as pairs for a list. Owners have no policy.
function subjectsOf(access, kind, owners) {
  if (kind === 'user') return access.members.filter(m => owners || m.role !== 'owner').map(m => [m.user_id, visible(m.email)]);
  if (kind === 'API key') return access.keys.map(k => [k.key_id, visible(k.name)]);
  return access.groups.map(g => [g.group_id, visible(g.name)]);
}

// nobody is what ChooseSubject begins with; idOf is the id of what was chosen, or empty.
export const nobody = {kind: 'user', id: '', namespace: '', name: ''};
export const idOf = ({kind, id, namespace, name}) => kind !== 'ServiceAccount' ? id : namespace && name ? `${serviceAccount}${namespace}:${name}` : '';

// ChooseSubject asks who is meant: value and onInput have what nobody has. kinds are those that are offered.
export function ChooseSubject({access, value, onInput, kinds = kindNames.map(([kind]) => kind), owners = false, label = 'Who', autofocus}) {
  const set = fields => onInput({...value, ...fields});
  const there = value.kind === 'ServiceAccount' ? [] : subjectsOf(access, value.kind, owners);
  return html`<div class="pairs">
    <${Choice} label="Kind" value=${value.kind} onInput=${kind => onInput({...nobody, kind})} options=${kindNames.filter(([kind]) => kinds.includes(kind))} autofocus=${autofocus} />
    ${value.kind !== 'ServiceAccount' ? html`<${Choice} label=${label} required value=${value.id} onInput=${id => set({id})}
      options=${[['', there.length === 0 ? `There is no ${value.kind} to choose` : 'Choose…'], ...there]} />`
    : html`<${Input} label="Namespace" maxlength="63" class="mono" autocapitalize="none" value=${value.namespace} onInput=${namespace => set({namespace})} />
      <${Input} label="ServiceAccount" maxlength="253" class="mono" autocapitalize="none" value=${value.name} onInput=${name => set({name})} />`}
  </div>`;
}
