// Groups: members to whom policies are bound together. A group only ever adds.
import {html, useState} from '../../vendor/preact.js';
import {unverified, useAccount} from '../../lib/account.js';
import {del, patch, post, put} from '../../lib/api.js';
import {count, visible} from '../../lib/format.js';
import {Narrowed} from '../../lib/list.js';
import {Losses} from '../../lib/losses.js';
import {ChooseSubject, Subject, idOf, loadAccess, nobody, said} from '../../lib/subjects.js';
import {Act, Confirm, Dialog, Empty, Form, Input, Link, Loaded, Name, Panel, Table, Time, say, useAsked, useLoad} from '../../lib/ui.js';

const at = (id, more = '') => '/api/v2/groups/' + encodeURIComponent(id) + more;
const memberOf = (group, subject) => at(group.group_id, '/members/' + encodeURIComponent(subject));

export function Groups() {
  const account = useAccount();
  const access = useLoad(loadAccess, []);
  const [open, setOpen] = useAsked({create: account.writes && {name: {name: ''}}}); // {name, members or remove}
  const close = () => setOpen(null);
  const done = message => {
    close();
    say(message);
    access.reload();
  };
  return html`<${Loaded} of=${access} lines=${6}>${a => {
    const members = open?.members && a.groups.find(g => g.group_id === open.members);
    return html`
    <${Panel} title="Groups" actions=${html`<button type="button" class="primary" disabled=${!account.writes} onClick=${() => setOpen({name: {name: ''}})}>Create a group</button>`}>
      <p class="quiet">A group only ever adds: a member with policies may also do what the policies of the group allow. A member without any is limited by nothing, and by no group. <${Link} to="/settings/policies">Bind policies to a group<//></p>
      ${a.groups.length === 0 ? html`<${Empty} title="No groups yet"><p>Create one for each team, and bind policies to it.</p><//>`
      : html`<${Narrowed} rows=${a.groups} label="Find a group" textOf=${g => [g.name, ...g.members.map(m => a.of(m).name ?? m), ...g.policies.map(a.policyName)].join('\n')}>${rows => html`
        <${Table} caption="List of groups" rowKey="group_id" rows=${rows} columns=${[
          {title: 'Name', cell: g => html`<${Name}>${g.name}<//>`},
          {title: 'Members', cell: g => html`<${Some} of=${g.members.map(m => html`<${Subject} of=${a.of(m)} />`)} />`},
          {title: 'Policies', cell: g => html`<${Some} of=${g.policies.map(p => html`<${Name}>${a.policyName(p)}<//>`)} />`},
          {title: 'Created', cell: g => html`<${Time} at=${g.created_at} />`},
          {title: 'Actions', hidden: true, class: 'fit', cell: g => html`<span class="actions">
            <button type="button" aria-label=${'Members of ' + visible(g.name)} onClick=${() => setOpen({members: g.group_id})}>Members</button>
            <button type="button" disabled=${!account.writes} aria-label=${'Rename ' + visible(g.name)} onClick=${() => setOpen({name: g})}>Rename</button>
            <button type="button" class="danger" aria-label=${'Delete ' + visible(g.name)} onClick=${() => setOpen({remove: g})}>Delete</button></span>`},
        ]} />`}<//>`}
    <//>
    ${open?.name && html`<${NameGroup} of=${open.name} onClose=${close} onDone=${done} />`}
    ${members && html`<${Members} of=${members} access=${a} onClose=${close} reload=${access.reload} />`}
    ${open?.remove && html`<${Confirm} title="Delete this group?" action="Delete" onClose=${close} onConfirm=${async () => {
        await del(at(open.remove.group_id));
        done('The group is deleted');
      }}><p>The ${count(open.remove.members.length, 'member')} of <${Name}>${open.remove.name}<//> lose${open.remove.members.length === 1 ? 's' : ''} what only the group allows. This cannot be undone.</p>
        <${Losses} access=${a} change=${{change: 'delete_group', group_id: open.remove.group_id}} /><//>`}`;
  }}<//>`;
}

const Some = ({of}) => of.length === 0 ? html`<span class="quiet">none</span>`
  : html`<ul class="plain">${of.slice(0, 5).map((one, i) => html`<li key=${i}>${one}</li>`)}${of.length > 5 && html`<li class="quiet">and ${of.length - 5} more</li>`}</ul>`;

function NameGroup({of, onClose, onDone}) {
  const account = useAccount();
  const [name, setName] = useState(of.name);
  const isNew = !of.group_id;
  return html`<${Dialog} title=${isNew ? 'Create a group' : 'Rename a group'} onClose=${onClose}>
    <${Form} submit=${isNew ? 'Create' : 'Rename'} cancel=${onClose} texts=${unverified(account)} onSubmit=${async () => {
      await (isNew ? post('/api/v2/groups', {name}) : patch(at(of.group_id), {name}));
      onDone(isNew ? 'The group is created' : 'The group is renamed');
    }}><${Input} label="Name" maxlength="255" value=${name} onInput=${setName} autofocus /><//>
  <//>`;
}

function Members({of, access, onClose, reload}) {
  const account = useAccount();
  const [who, setWho] = useState(nobody);
  const [removing, setRemoving] = useState(null);
  const subject = idOf(who);
  const add = async () => {
    await put(memberOf(of, subject));
    setWho({...nobody, kind: who.kind});
    say('The member is added');
    reload();
  };
  const remove = async () => {
    await del(memberOf(of, removing));
    setRemoving(null);
    say('The member is removed');
    reload();
  };
  return html`<${Dialog} title="Members of a group" onClose=${onClose}>
    <div class="stack">
      <p><${Name}>${of.name}<//>: ${count(of.members.length, 'member')}</p>
      ${of.members.length > 0 && html`<${Narrowed} rows=${of.members} label="Find a member" textOf=${m => access.of(m).name ?? m}>${rows => html`<ul class="list tall">${rows.map(m => html`
        <li key=${m}><${Subject} of=${access.of(m)} /><button type="button" class="danger" aria-label=${'Remove ' + said(access.of(m))} onClick=${() => setRemoving(m)}>Remove</button></li>`)}</ul>`}<//>`}
      ${removing ? html`<div class="stack tight"><p>Remove <${Subject} of=${access.of(removing)} />? From the next request on, what only this group allows is refused.</p>
        <${Losses} access=${access} change=${{change: 'remove_member', group_id: of.group_id, subject: removing}} />
        <div class="actions"><${Act} kind="danger" onClick=${remove}>Remove the member<//><button type="button" onClick=${() => setRemoving(null)}>Keep the member</button></div></div>`
      : html`<${Form} onSubmit=${add} submit="Add" texts=${unverified(account)}><${ChooseSubject} access=${access} value=${who} onInput=${setWho} kinds=${['user', 'ServiceAccount']} owners /><//>`}
    </div>
  <//>`;
}
