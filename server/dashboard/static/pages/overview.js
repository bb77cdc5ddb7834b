// The overview: what needs attention, each part loaded for itself, so that one that
// fails hides no other.
import {html} from '../vendor/preact.js';
import {useAccount} from '../lib/account.js';
import {get} from '../lib/api.js';
import {Actor, Proof} from '../lib/log.js';
import {count, number} from '../lib/format.js';
import {deed, frameworks} from '../lib/words.js';
import {useScores} from '../lib/scores.js';
import {Empty, Facts, Hash, Link, Loaded, Name, Page, Panel, Tag, Time, Trouble, useLoad} from '../lib/ui.js';

export function Overview() {
  const account = useAccount();
  const scores = useScores(account.can('compliance:read'));
  return html`<${Page} title="Overview" lead=${html`<${Name}>${account.tenant.name}<//>`}>
    <div class="grid">
      ${account.can('vault:read') && html`<${Credentials} />`}
      ${account.can('keys:read') && html`<${Rotations} />`}
      ${account.can('audit:read') && html`<${Chain} scores=${scores} />`}
      ${account.can('compliance:read') && html`<${Scores} of=${scores} />`}
      ${account.can('audit:read') && html`<${Denials} />`}
    </div>
  <//>`;
}

const Number = ({n, unit, to}) => html`<span><strong>${number(n)}</strong> <span class="quiet">${to ? html`<${Link} to=${to}>${unit}<//>` : unit}</span></span>`;

function Credentials() {
  const account = useAccount();
  const summary = useLoad(signal => get('/api/v2/vault/summary', undefined, signal), []);
  return html`<${Panel} title="Credentials"><${Loaded} of=${summary}>${s => s.total === 0
    ? html`<${Empty} title="The vault is empty"><p>Seal a credential here, or apply a SealedCredential to the cluster.</p>
        ${account.can('vault:write') && html`<${Link} class="button primary" to="/vault/new">Seal a credential<//>`}<//>`
    : html`
      <div class="numbers">
        <${Number} n=${s.active} unit="active" to="/vault?status=active" />
        <${Number} n=${s.expiring_soon} unit=${`expiring within ${count(s.expiring_within_days, 'day')}`} to=${`/vault?status=active&within=${s.expiring_within_days}`} />
        ${s.never_expire > 0 && html`<${Number} n=${s.never_expire} unit="never expire" />`}
        <${Number} n=${s.expired} unit="expired" to="/vault?status=expired" />
      </div>
      ${s.complete === false && html`<p class="quiet">There are more than were counted: the numbers are lower bounds.</p>`}
      ${s.next_to_expire.length > 0 && html`<h3>Expiring next</h3><ul class="list">${s.next_to_expire.slice(0, 5).map(c => html`
        <li key=${c.credential_id}><${Link} to=${'/vault/' + c.credential_id}><${Name}>${c.name}<//><//><${Time} at=${c.expires_at} relative /></li>`)}</ul>`}`}<//><//>`;
}

function Rotations() {
  const keys = useLoad(signal => get('/api/v2/keys', {limit: 100}, signal), []);
  return html`<${Panel} title="Key rotations"><${Loaded} of=${keys}>${({keys: list, next_cursor: more}) => {
    if (list.length === 0) return html`<${Empty} title="No named keys"><p>Encrypting works without one. A named key gives an application its own, which rotates by itself.</p><${Link} class="button" to="/keys">Keys<//><//>`;
    const soon = [...list].sort((a, b) => a.next_rotation_at.localeCompare(b.next_rotation_at));
    const due = soon.filter(k => new Date(k.next_rotation_at) < Date.now() + 7 * 86400e3);
    return html`<div class="numbers"><${Number} n=${due.length} unit=${'due within 7 days' + (more ? ', of the first 100 keys' : '')} to="/keys" /></div>
      <h3>Next</h3><ul class="list">${soon.slice(0, 5).map(k => html`
        <li key=${k.key_id}><${Link} to=${'/keys/' + k.key_id}><${Name}>${k.name}<//><//><${Time} at=${k.next_rotation_at} relative /></li>`)}</ul>`;
  }}<//><//>`;
}

function Chain({scores}) {
  const account = useAccount();
  const proof = Object.values(scores.results).find(r => r.score)?.score.proof;
  // The head is asked for after the proof, so that it is not older than what is verified.
  const ready = !account.can('compliance:read') || Object.keys(scores.results).length > 0 || scores.stopped !== null;
  const head = useLoad(signal => ready ? get('/api/v2/audit/checkpoint', undefined, signal) : new Promise(() => {}), [ready]);
  return html`<${Panel} title="Audit chain" actions=${html`<${Link} to="/audit">Audit log<//>`}>
    ${proof && html`<p>The server says: <${Proof} of=${proof} /> ${proof.verified_to > 0 && html`up to entry ${number(proof.verified_to)}`}${proof.verified_at && html`, <${Time} at=${proof.verified_at} relative />`}</p>`}
    <${Loaded} of=${head}>${h => html`<${Facts} of=${[
      ['Signed head', html`entry ${number(h.sequence)}`],
      ['Hash', html`<${Hash}>${h.hash}<//>`],
      ['Tree', html`${count(h.tree_size, 'entry', 'entries')}`],
      ['Epoch', h.epoch > 1 && html`${number(h.epoch)}, since ${count(h.epoch - 1, 'rollback was', 'rollbacks were')} accepted`],
      ['Newest entry', html`<${Time} at=${h.timestamp} />`],
    ]} />`}<//>
  <//>`;
}

function Scores({of: {results, stopped, again}}) {
  const failed = stopped ?? Object.values(results).find(r => r.error)?.error;
  return html`<${Panel} title="Compliance scores" actions=${html`<${Link} to="/compliance">Compliance<//>`}>
    <ul class="list">${Object.entries(frameworks).map(([framework, name]) => {
      const {score: s, error} = results[framework] ?? {};
      return html`<li key=${framework}><${Link} to=${'/compliance/' + framework}>${name}<//><span>${s === undefined ? html`<span class="quiet">${error || stopped ? 'not known' : 'loading'}</span>`
        : s.score === null ? html`<${Tag} kind="warn">withheld<//>` : html`<strong>${Math.round(s.score * 10) / 10}</strong> <span class="quiet">of 100, ${Math.round(s.coverage.percent)} % covered</span>${s.provisional && html` <${Tag} kind="warn">provisional<//>`}`}</span></li>`;
    })}</ul>
    ${failed && html`<${Trouble} error=${failed} retry=${again} />`}
  <//>`;
}

function Denials() {
  const account = useAccount();
  const denied = useLoad(signal => get('/api/v2/audit/logs', {outcome: 'denied', limit: 5}, signal), []);
  return html`<${Panel} title="Recent denials" actions=${html`<${Link} to="/audit?outcome=denied">All<//>`}><${Loaded} of=${denied}>${({entries, next_cursor: more}) => entries.length === 0
    ? html`<p class="quiet">${more ? 'None among the newest entries.' : 'None.'}</p>`
    : html`<p class="quiet">What was attempted and refused:</p><ul class="list">${entries.map(e => html`
      <li key=${e.sequence}><${Link} to=${'/audit/' + e.sequence}>${deed(e)}<//><span class="quiet"><${Actor} of=${e.actor} mine=${account.user?.user_id} /></span><${Time} at=${e.timestamp} relative /></li>`)}</ul>`}<//><//>`;
}
