// The users of the organisation, and the invitations that are open.
import {html, useState} from '../../vendor/preact.js';
import {unverified, useAccount} from '../../lib/account.js';
import {del, get, post, put} from '../../lib/api.js';
import {count, visible} from '../../lib/format.js';
import {roles} from '../../lib/words.js';
import {Act, Address, Choice, Confirm, Dialog, Form, Input, Loaded, Name, Panel, Table, Tag, Time, say, useAsked, useLoad} from '../../lib/ui.js';

export function Members() {
  const account = useAccount();
  const members = useLoad(signal => get('/api/v2/members', undefined, signal), []);
  const [inviting, setInviting] = useAsked({invite: account.writes});
  const [changing, setChanging] = useState(null);
  const [removing, setRemoving] = useState(null);
  const me = account.user?.user_id;
  return html`<${Loaded} of=${members}>${({members: list, invitations}) => html`
    <${Panel} title=${count(list.length, 'member')} actions=${html`<button type="button" class="primary" disabled=${!account.writes} onClick=${() => setInviting(true)}>Invite member</button>`}>
      ${!account.writes && html`<p class="hint">Inviting and changing roles is not possible since the trial has ended.</p>`}
      <${Table} caption="Members" rowKey="user_id" rows=${list} columns=${[
        {title: 'Address', cell: m => html`<span><${Address}>${m.email}<//>${m.user_id === me ? ' (you)' : ''}</span>`},
        {title: 'Role', cell: m => m.role},
        {title: 'Verified', cell: m => m.email_verified ? html`<${Tag} kind="good">yes<//>` : html`<${Tag} kind="warn">not yet<//>`},
        {title: 'Since', cell: m => html`<${Time} at=${m.created_at} />`},
        {title: 'Actions', hidden: true, class: 'fit', cell: m => (m.role !== 'owner' || account.user?.role === 'owner') && html`<span class="actions">
          <button type="button" disabled=${!account.writes} aria-label=${'Change role of ' + visible(m.email)} onClick=${() => setChanging(m)}>Change role</button>
          <button type="button" class="danger" aria-label=${'Remove ' + visible(m.email)} onClick=${() => setRemoving(m)}>Remove</button></span>`},
      ]} />
    <//>
    <${Panel} title="Open invitations">${invitations.length === 0 ? html`<p class="quiet">None. Invite a member, and they get an e-mail with a link.</p>`
      : html`<${Table} caption="Invitations" rowKey="invitation_id" rows=${invitations} columns=${[
          {title: 'Address', cell: i => html`<${Address}>${i.email}<//>`},
          {title: 'Role', cell: i => i.role},
          {title: 'Expires', cell: i => html`<${Time} at=${i.expires_at} relative />`},
          {title: 'Actions', hidden: true, class: 'fit', cell: i => html`<${Act} kind="danger" aria-label=${'Withdraw the invitation of ' + visible(i.email)} done="The invitation is withdrawn" onClick=${async () => {
            await del('/api/v2/members/invitations/' + encodeURIComponent(i.invitation_id));
            members.reload();
          }}>Withdraw<//>`},
        ]} />`}<//>
    ${inviting && html`<${Invite} onClose=${() => setInviting(false)} onDone=${() => { setInviting(false); members.reload(); }} />`}
    ${changing && html`<${ChangeRole} member=${changing} onClose=${() => setChanging(null)} onDone=${() => { setChanging(null); members.reload(); account.reload(); }} />`}
    ${removing && html`<${Confirm} title="Remove this member?" action="Remove" onClose=${() => setRemoving(null)} texts=${{409: 'An organisation keeps at least one owner. Make somebody else an owner first.'}} onConfirm=${async () => {
        await del('/api/v2/members/' + encodeURIComponent(removing.user_id));
        say('The member is removed');
        if (removing.user_id === me) location.assign('/sign-in');
        else members.reload();
      }}><p><${Name}>${removing.email}<//> loses access at once, with all sessions. What they made stays.</p><//>`}`}<//>`;
}

function Invite({onClose, onDone}) {
  const account = useAccount();
  const [email, setEmail] = useState('');
  const [role, setRole] = useState('member');
  return html`<${Dialog} title="Invite member" onClose=${onClose}>
    <${Form} submit="Send the invitation" cancel=${onClose} texts=${{...unverified(account), 409: 'This address has an account or an open invitation already.'}} onSubmit=${async () => {
      await post('/api/v2/members/invite', {email, role});
      say('The invitation is on its way');
      onDone();
    }}>
      <${Input} label="E-mail address" type="email" value=${email} onInput=${setEmail} autofocus />
      <${Choice} label="Role" value=${role} onInput=${setRole} options=${roles} />
    <//>
  <//>`;
}

function ChangeRole({member, onClose, onDone}) {
  const [role, setRole] = useState(member.role);
  return html`<${Dialog} title="Change a role" onClose=${onClose}>
    <${Form} submit="Change" cancel=${onClose} texts=${{409: 'An organisation keeps at least one owner. Make somebody else an owner first.'}} onSubmit=${async () => {
      await put('/api/v2/members/' + encodeURIComponent(member.user_id), {role});
      say('The role is changed');
      onDone();
    }}>
      <p><${Name}>${member.email}<//></p>
      <${Choice} label="Role" value=${role} onInput=${setRole} options=${roles} />
    <//>
  <//>`;
}
