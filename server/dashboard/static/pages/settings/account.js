// What belongs to the user, and the plan of the organisation.
import {html, useState} from '../../vendor/preact.js';
import {useAccount} from '../../lib/account.js';
import {del, get, post} from '../../lib/api.js';
import {number, visible} from '../../lib/format.js';
import {scopes} from '../../lib/words.js';
import {Act, Facts, Form, Hash, Loaded, Name, Panel, Password, Table, Tag, Time, say, useLoad} from '../../lib/ui.js';

export function Profile() {
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

export function ChangePassword() {
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

export function Sessions() {
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
      {title: 'Device', cell: s => html`${s.device ? html`<${Name}>${s.device}<//>` : html`<span class="quiet">not known</span>`}${s.current && html` <${Tag} kind="good">this one<//>`}`},
      {title: 'Address', class: 'once', cell: s => s.address ? html`<code>${visible(s.address)}</code>` : html`<span class="quiet">not known</span>`},
      {title: 'Signed in', class: 'once', cell: s => html`<${Time} at=${s.created_at} short />`},
      {title: 'Last active', class: 'once', cell: s => html`<${Time} at=${s.last_used_at} relative />`},
      {title: 'Expires', class: 'once', cell: s => html`<${Time} at=${s.expires_at} relative />`},
      {title: 'Session', class: 'once', cell: s => html`<${Hash} label="Copy the id">${s.session_id}<//>`},
      {title: 'Actions', hidden: true, class: 'fit', cell: s => html`<${Act} kind="danger" aria-label=${s.current ? 'Sign out of this session' : 'Sign out of the session ' + s.session_id} done="The session is signed out" onClick=${() => endOne(s)}>Sign out<//>`},
    ]} />`}<//>
  <//>`;
}

const standing = {trial: ['warn', 'trial'], active: ['good', 'active'], read_only: ['bad', 'read only: the trial has ended']};

export function Plan() {
  const {tenant, effective_limits: limits} = useAccount();
  const [kind, text] = standing[tenant.status] ?? ['plain', tenant.status];
  const limit = v => limits && html`${number(limits[v])} requests a minute <span class="quiet">${tenant.limits?.[v] ? 'set for your organisation' : 'as for everybody'}</span>`;
  return html`<${Panel} title="Plan of your organisation">
    <${Facts} of=${[
      ['State', html`<${Tag} kind=${kind}>${text}<//>`],
      [tenant.status === 'read_only' ? 'Trial ended' : 'Trial ends', tenant.trial_ends_at && html`<${Time} at=${tenant.trial_ends_at} />, <${Time} at=${tenant.trial_ends_at} relative />`],
      ['Organisation since', html`<${Time} at=${tenant.created_at} />`],
      ['Limit of version 1 of the interface', limit('v1')],
      ['Limit of version 2 of the interface', limit('v2')],
    ]} />
    <p class="quiet">The operator of this service activates plans and sets limits. When a trial has ended, credentials can still be read and deleted, data decrypted, signatures verified, and keys of programs revoked.</p>
  <//>`;
}
