// The overview: whether anything is wrong, what waits, and what happened. All of it is one answer, and one entry
// in the audit log.
import {html} from '../vendor/preact.js';
import {useAccount} from '../lib/account.js';
import {get} from '../lib/api.js';
import {Icon} from '../lib/icons.js';
import {Days} from '../lib/charts.js';
import {count, number} from '../lib/format.js';
import {frameworks} from '../lib/words.js';
import {LastRead, Link, Loaded, Name, Page, Panel, Tag, Time, useLoad} from '../lib/ui.js';

export function Overview() {
  const account = useAccount();
  const overview = useLoad(signal => get('/api/v2/overview', undefined, signal), []);
  return html`<${Page} title="Overview" lead=${html`<${Name}>${account.tenant.name}<//>`}>
    <${Loaded} of=${overview} lines=${8}>${o => html`<div class="overview">
      ${o.unavailable && html`<p class="notice">Not everything can be shown at the moment: ${o.unavailable.map(part => parts[part]).join(', ')}. <button type="button" class="plain" onClick=${overview.reload}>Load again</button></p>`}
      ${o.health && html`<${Health} of=${o.health} at=${o.health_at} />`}
      <${Setup} of=${o} />
      <${Todo} of=${o.todo} alone=${!o.credentials} />
      ${o.credentials && html`<${Credentials} of=${o.credentials} />`}
      ${o.activity && html`<${Activity} of=${o.activity} />`}
      ${o.scores && html`<${Scores} of=${o.scores} />`}
    </div>`}<//>
  <//>`;
}

const parts = {account: 'your account', activity: 'the activity', api_keys: 'API keys and members', compliance: 'reviews, denials and scores', credentials: 'credentials', keys: 'named keys'};

// ---- whether anything is wrong

const healthNames = {chain: 'Audit log', rows: 'Stored rows', anchors: 'Anchors', kms: 'KMS', backups: 'Backups', certificates: 'Certificates'};
const healthKinds = {ok: 'good', warning: 'warn', failed: 'bad', unknown: 'plain'};
const healthWords = {ok: 'ok', warning: 'warning', failed: 'failed', unknown: 'not known'};

// Health is a line: what is well has its name, the rest also what is wrong.
function Health({of, at}) {
  const wrong = of.filter(h => h.status === 'failed' || h.status === 'warning');
  const chain = of.find(h => h.part === 'chain' && h.status === 'ok');
  return html`<${Panel} title="Health" class="panel wide line">
    <ul class="health">${of.map(h => html`<li key=${h.part}><${Tag} kind=${healthKinds[h.status]}>${healthNames[h.part]}<span class="unseen">: ${healthWords[h.status]}</span><//></li>`)}
      ${chain && html`<li class="quiet">${chain.message}</li>`}</ul>
    ${(wrong.length > 0 || at) && html`<ul class="remarks">${wrong.map(h => html`<li key=${h.part}><strong>${healthNames[h.part]}</strong> ${h.message}</li>`)}
      <li class="quiet">${wrong.length > 0 && 'The operator of this service has to fix these. '}${at && html`Looked at <${Time} at=${at} relative />.`}</li></ul>`}
  <//>`;
}

// ---- what waits

// What each kind of work is called, and where it is done.
const work = {
  credentials_expired: [n => `${count(n, 'credential has', 'credentials have')} expired`, '/vault?status=expired', 'bad'],
  credentials_expiring: [n => `${count(n, 'credential expires', 'credentials expire')} within 7 days`, '/vault?status=active&within=7', 'warn'],
  reviews_waiting: [n => `${count(n, 'denial or failure waits', 'denials and failures wait')} for a review`, '/audit', 'warn'],
  api_keys_pending: [n => `${count(n, 'API key waits', 'API keys wait')} for approval`, '/settings/api-keys', 'warn'],
  api_keys_expiring: [n => `${count(n, 'API key expires', 'API keys expire')} within 7 days`, '/settings/api-keys', 'warn'],
  keys_overdue: [n => `${count(n, 'named key is', 'named keys are')} overdue for rotation`, '/keys', 'warn'],
  email_unverified: [() => 'Your address is not verified', '/settings/profile', 'warn'],
};

function Todo({of, alone}) {
  const failing = of.filter(t => t.kind === 'controls_failing');
  const items = of.filter(t => work[t.kind]).map(t => ({key: t.kind, text: work[t.kind][0](t.count), to: work[t.kind][1], kind: work[t.kind][2]}));
  if (failing.length > 0) {
    items.push({
      key: 'controls_failing', kind: 'warn', to: failing.length === 1 ? '/compliance/' + failing[0].framework : '/compliance',
      text: `Controls that you can fix fail in ${failing.length === 1 ? frameworks[failing[0].framework] : count(failing.length, 'framework')}`,
    });
  }
  return html`<${Panel} title="What needs you" class=${alone ? 'panel wide' : 'panel'}>${items.length === 0
    ? html`<p class="row"><${Tag} kind="good">all done<//> Nothing needs you.</p>`
    : html`<ul class="list todo">${items.map(t => html`<li key=${t.key} class=${t.kind}><${Link} to=${t.to}>${t.text}<//></li>`)}</ul>`}<//>`;
}

// Setup leads through a tenant that has next to nothing.
function Setup({of: {setup, credentials}}) {
  const account = useAccount();
  const steps = [
    ['email', 'Verify your address', '/settings/profile', true],
    ['credential', 'Create a credential', '/vault/new', account.can('vault:write')],
    ['api_key', 'Create an API key', '/settings/api-keys', account.can('account:admin')],
    ['member', 'Invite a member', '/settings/members', account.can('account:admin')],
  ].filter(([step, , , may]) => may && setup[step] !== undefined);
  const done = steps.filter(([step]) => setup[step]).length;
  if (!credentials || credentials.total > 1 || done === steps.length) return '';
  return html`<${Panel} title="First steps" class="panel wide" actions=${html`<span class="quiet">${done} of ${steps.length} done</span>`}>
    <ol class="list steps">${steps.map(([step, text, to]) => html`<li key=${step}>${setup[step]
      ? html`<span class="row"><${Icon} name="Check" /><span class="quiet">${text}</span><span class="unseen">: done</span></span>`
      : html`<span class="row"><span class="open" aria-hidden="true"></span><${Link} to=${to}>${text}<//></span>`}</li>`)}</ol>
  <//>`;
}

// ---- what happened

const Activity = ({of}) => html`<${Panel} title="Last 30 days" class="panel wide"><${Days} of=${of} /><//>`;

const Number = ({n, unit, to}) => html`<span><strong>${number(n)}</strong> <span class="quiet"><${Link} to=${to}>${unit}<//></span></span>`;

function Credentials({of: c}) {
  const {unread} = c;
  return html`<${Panel} title="Credentials" actions=${html`<${Link} to="/vault">All credentials<//>`}>
    <div class="numbers">
      <${Number} n=${c.active} unit="active" to="/vault?status=active" />
      <${Number} n=${c.expiring_soon} unit="expire within 7 days" to="/vault?status=active&within=7" />
      <${Number} n=${c.expired} unit="expired" to="/vault?status=expired" />
    </div>
    ${!c.complete && html`<p class="quiet">There are more than were counted: the numbers are lower bounds.</p>`}
    ${unread?.count > 0 && html`<h3>${unread.complete ? '' : 'At least '}${count(unread.count, 'credential')} that nobody has read for ${unread.days} days</h3>
      <ul class="list">${unread.credentials.map(one => html`<li key=${one.credential_id}><${Link} to=${'/vault/' + one.credential_id}><${Name}>${one.name}<//><//>
        <span class="quiet">${one.last_read_at ? html`read <${LastRead} at=${one.last_read_at} />` : html`created <${Time} at=${one.created_at} relative />, not read`}</span></li>`)}</ul>
      ${unread.count > unread.credentials.length && html`<p><${Link} to="/vault?sort=unread">All credentials, unused for the longest time first<//></p>`}`}
  <//>`;
}

function Scores({of}) {
  return html`<${Panel} title="Compliance scores" class="panel wide" actions=${html`<${Link} to="/compliance">All frameworks<//>`}>
    <ul class="list scores">${of.map(s => html`<li key=${s.framework}><${Link} to=${'/compliance/' + s.framework}>${frameworks[s.framework]}<//>
      <span>${s.failing > 0 && html`<span class="quiet">${number(s.failing)} to fix</span> `}${s.score === null ? html`<${Tag} kind="warn">withheld<//>` : html`<strong>${Math.round(s.score * 10) / 10}</strong>`}</span></li>`)}</ul>
    <p class="quiet">Of 100, for the controls that this service has evidence for.${of.some(s => s.provisional) ? ' Provisional: the deployment was not assessed yet.' : ''}</p>
  <//>`;
}
