// Settings: what belongs to the account and to the organisation.
import {html, useState} from '../vendor/preact.js';
import {useAccount} from '../lib/account.js';
import {del, get, post, put} from '../lib/api.js';
import {count, number, visible} from '../lib/format.js';
import {roles, scopes} from '../lib/words.js';
import {Act, Choice, Confirm, Copy, Dialog, Empty, Facts, Form, Hash, Input, Link, Loaded, Name, Page, Panel, Password, Table, Tag, Time, say, useHere, useLoad} from '../lib/ui.js';

const parts = {
  'api-keys': ['API keys', APIKeys, 'account:admin'],
  members: ['Members', Members, 'account:admin'],
  profile: ['Profile', Profile],
  password: ['Password', ChangePassword],
  sessions: ['Sessions', Sessions],
  plan: ['Plan', Plan],
};

export function Settings() {
  const account = useAccount();
  const {params} = useHere();
  const part = params.part ?? (account.can('account:admin') ? 'api-keys' : 'profile');
  const [title, Part, scope] = Object.hasOwn(parts, part) ? parts[part] : ['Settings'];
  return html`<${Page} title=${title}>
    <nav class="row tabs" aria-label="Settings">${Object.entries(parts).filter(([, [, , scope]]) => !scope || account.can(scope)).map(([name, [text]]) => html`
      <${Link} key=${name} to=${'/settings/' + name} aria-current=${name === part ? 'page' : undefined}>${text}<//>`)}</nav>
    ${!Part ? html`<${Empty} title="There is no such part of the settings"><p>Choose one of those above.</p><//>`
    : scope && !account.can(scope) ? html`<${Empty} title="Your role does not allow this"><p>Owners and admins of your organisation see it. Ask one of them.</p><//>`
    : html`<${Part} />`}
  <//>`;
}

function APIKeys() {
  const account = useAccount();
  const keys = useLoad(signal => get('/api/v2/api-keys', undefined, signal), []);
  const [making, setMaking] = useState(false);
  const [made, setMade] = useState(null);
  const [revoking, setRevoking] = useState(null);
  const [approving, setApproving] = useState(null);
  return html`<${Panel} title="Keys for programs" actions=${html`<button type="button" class="primary" disabled=${!account.writes} onClick=${() => setMaking(true)}>Create an API key</button>`}>
    <p class="quiet">A key is sent in the header <code>X-API-Key</code>, for version 1 of the interface as <code>Authorization: Bearer</code>. It is shown once. Store it securely and keep it out of version control.</p>
    ${!account.writes && html`<p class="hint">Creating one is not possible since the trial has ended.</p>`}
    <${Loaded} of=${keys}>${({api_keys: list}) => list.length === 0
      ? html`<${Empty} title="No API keys yet"><p>Create one for each program, with the scopes that it needs and no more.</p><//>`
      : html`<${Table} caption="API keys" rowKey="key_id" rows=${list} columns=${[
          {title: 'Name', cell: k => html`<${Name}>${k.name}<//>`},
          {title: 'Id', cell: k => html`<${Hash} label="Copy the id">${k.key_id}<//>`},
          {title: 'Scopes', cell: k => k.scopes.join(', ')},
          {title: 'Created', cell: k => html`<${Time} at=${k.created_at} />`},
          {title: 'Last used', cell: k => html`<${Time} at=${k.last_used_at} relative />`},
          {title: 'Expires', cell: k => k.status === 'expired' ? html`<${Tag} kind="bad">expired<//>` : k.status === 'pending' ? html`<${Tag} kind="warn">waits for approval<//>` : html`<${Time} at=${k.expires_at} relative />`},
          {title: 'Actions', hidden: true, class: 'fit', cell: k => html`<span class="actions">${k.status === 'pending' && account.user?.role === 'owner' && html`<button type="button" aria-label=${'Approve ' + visible(k.name)} onClick=${() => setApproving(k)}>Approve</button>`}
            <button type="button" class="danger" aria-label=${'Revoke ' + visible(k.name)} onClick=${() => setRevoking(k)}>Revoke</button></span>`},
        ]} />`}<//>
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

// What takes a verified address says so, to whom has none.
const unverified = ({user}) => user && !user.email_verified ? {403: 'This takes a verified e-mail address. Follow the link in the mail that came when you registered.'} : {};

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

function Members() {
  const account = useAccount();
  const members = useLoad(signal => get('/api/v2/members', undefined, signal), []);
  const [inviting, setInviting] = useState(false);
  const [changing, setChanging] = useState(null);
  const [removing, setRemoving] = useState(null);
  const me = account.user?.user_id;
  return html`<${Loaded} of=${members}>${({members: list, invitations}) => html`
    <${Panel} title=${count(list.length, 'member')} actions=${html`<button type="button" class="primary" disabled=${!account.writes} onClick=${() => setInviting(true)}>Invite member</button>`}>
      ${!account.writes && html`<p class="hint">Inviting and changing roles is not possible since the trial has ended.</p>`}
      <${Table} caption="Members" rowKey="user_id" rows=${list} columns=${[
        {title: 'Address', cell: m => html`<${Name}>${m.email}<//>${m.user_id === me ? ' (you)' : ''}`},
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
          {title: 'Address', cell: i => html`<${Name}>${i.email}<//>`},
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

function Profile() {
  const {user, tenant, principal} = useAccount();
  return html`<${Panel} title="You">
    <${Facts} of=${[
      ['E-mail address', user && html`<${Name}>${user.email}<//>`],
      ['Address verified', user && (user.email_verified ? html`<${Tag} kind="good">yes<//>` : html`<${Tag} kind="warn">not yet<//>`)],
      ['Role', user?.role],
      ['What you may do', principal.scopes.map(s => scopes[s] ?? s).join('. ') + '.'],
      ['Your id', html`<${Hash} whole>${principal.id}<//>`],
      ['Registered', user && html`<${Time} at=${user.created_at} />`],
      ['Organisation', html`<${Name}>${tenant.name}<//>`],
      ['Organisation id', html`<${Hash} whole>${tenant.tenant_id}<//>`],
    ]} />
  <//>`;
}

function ChangePassword() {
  const {user} = useAccount();
  const [current, setCurrent] = useState('');
  const [chosen, setChosen] = useState('');
  const change = async () => {
    await post('/api/v2/auth/change-password', {current_password: current, new_password: chosen});
    setCurrent('');
    setChosen('');
    say('Your password is changed; your other sessions have ended');
  };
  return html`<${Panel} title="Change your password">
    <div class="narrow"><${Form} onSubmit=${change} submit="Change the password" texts=${{403: 'The current password is not right, or this cannot be changed now.', 422: 'A password has 12 to 1024 characters. Choose another one.'}}>
      <input type="email" autocomplete="username" readonly hidden value=${user?.email} />
      <${Password} label="Current password" autocomplete="current-password" value=${current} onInput=${setCurrent} />
      <${Password} label="New password" autocomplete="new-password" minlength="12" maxlength="1024" hint="At least 12 characters. Your other sessions end." value=${chosen} onInput=${setChosen} />
    <//></div>
  <//>`;
}

function Sessions() {
  const sessions = useLoad(signal => get('/api/v2/auth/sessions', undefined, signal), []);
  const end = s => del('/api/v2/auth/sessions/' + encodeURIComponent(s.session_id));
  const endOne = async s => {
    await end(s);
    if (s.current) location.assign('/sign-in');
    else sessions.reload();
  };
  const others = sessions.data?.sessions.filter(s => !s.current) ?? [];
  const endOthers = async () => {
    for (const s of others) await end(s);
    sessions.reload();
  };
  return html`<${Panel} title="Where you are signed in" actions=${others.length > 0 && html`<${Act} kind="danger" done="All other sessions are signed out" onClick=${endOthers}>Sign out all others<//>`}>
    <${Loaded} of=${sessions}>${({sessions: list}) => html`<${Table} caption="Sessions" rowKey="session_id" rows=${list} columns=${[
      {title: 'Session', cell: s => html`<${Hash}>${s.session_id}<//>${s.current && html` <${Tag} kind="good">this one<//>`}`},
      {title: 'Signed in', cell: s => html`<${Time} at=${s.created_at} />`},
      {title: 'Last active', cell: s => html`<${Time} at=${s.last_used_at} relative />`},
      {title: 'Expires', cell: s => html`<${Time} at=${s.expires_at} relative />`},
      {title: 'Actions', hidden: true, class: 'fit', cell: s => html`<${Act} kind="danger" aria-label=${s.current ? 'Sign out of this session' : 'Sign out of the session ' + s.session_id} done="The session is signed out" onClick=${() => endOne(s)}>Sign out<//>`},
    ]} />`}<//>
  <//>`;
}

const standing = {trial: ['warn', 'trial'], active: ['good', 'active'], read_only: ['bad', 'read only: the trial has ended']};

function Plan() {
  const {tenant} = useAccount();
  const [kind, text] = standing[tenant.status] ?? ['plain', tenant.status];
  const limit = n => n ? `${number(n)} requests a minute` : 'the default of this service';
  return html`<${Panel} title="Plan of your organisation">
    <${Facts} of=${[
      ['State', html`<${Tag} kind=${kind}>${text}<//>`],
      [tenant.status === 'read_only' ? 'Trial ended' : 'Trial ends', tenant.trial_ends_at && html`<${Time} at=${tenant.trial_ends_at} />, <${Time} at=${tenant.trial_ends_at} relative />`],
      ['Organisation since', html`<${Time} at=${tenant.created_at} />`],
      ['Limit of version 1 of the interface', limit(tenant.limits?.v1)],
      ['Limit of version 2 of the interface', limit(tenant.limits?.v2)],
    ]} />
    <p class="quiet">The operator of this service activates plans and sets limits. When a trial has ended, credentials can still be read and deleted, data decrypted, signatures verified, and keys of programs revoked.</p>
  <//>`;
}
