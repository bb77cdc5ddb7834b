// Reviews: a member states what they looked at. Scores count these statements, and no reads.
import {html, useEffect, useRef, useState} from '../vendor/preact.js';
import {useAccount} from '../lib/account.js';
import {get, post} from '../lib/api.js';
import {count, number} from '../lib/format.js';
import {Dialog, Form, Input, Link, Loaded, Time, say, useAsked, useLoad} from '../lib/ui.js';

const attempts = (denials, failures) => [denials && count(denials, 'denial'), failures && count(failures, 'failure')].filter(Boolean).join(' and ');

// What can be reviewed: the scope that it takes besides audit:read, and what a member states.
const subjects = {
  denials: {title: 'Audit log', last: 'log_reviewed_at', due: 'every month',
    says: w => html`<p>You say that you looked at the entries ${number(w.from)} to ${number(w.to)} of your organisation${attempts(w.denials, w.failures) && `, and at ${attempts(w.denials, w.failures)} among them`}.</p>`},
  access: {title: 'API keys and members', last: 'access_reviewed_at', due: 'every quarter', scope: 'account:admin',
    says: () => html`<p>You say that you looked at all <${Link} to="/settings/api-keys">API keys<//> and <${Link} to="/settings/members">members<//>, and that each still needs what it may do.</p>`},
  inventory: {title: 'Inventory of cryptography', last: 'inventory_reviewed_at', due: 'every year', scope: 'compliance:read',
    says: () => html`<p>You say that you looked at the inventory of the algorithms and keys in use.</p>`},
};

const askedAgain = 3_000; // ms after an answer that there is none yet

export function Reviews({onDone}) {
  const account = useAccount();
  const waiting = useLoad(signal => get('/api/v2/audit/reviews', undefined, signal), []);
  // Of a long log the server counts first, in the background, and the rest of the page does not wait for it.
  const late = useRef(false);
  late.current = waiting.error ? waiting.error.status === 503 : late.current && waiting.loading;
  useEffect(() => {
    if (waiting.error?.status !== 503) return;
    const timer = setTimeout(waiting.reload, askedAgain);
    return () => clearTimeout(timer);
  }, [waiting.error]);
  const [subject, setSubject] = useAsked({review: 'denials'});
  const done = () => {
    setSubject(null);
    say('The review is in the log');
    waiting.reload();
    onDone();
  };
  if (late.current && waiting.data === undefined) return html`<p class="notice" role="status">What waits for a review is not counted yet. This page asks again by itself.</p>`;
  return html`<${Loaded} of=${waiting} lines=${1}>${w => {
    const open = attempts(w.denials, w.failures), own = attempts(w.own_denials, w.own_failures);
    return html`<details class="panel" open=${open !== ''}>
      <summary>Reviews${open ? '' : html` <span class="quiet">Nothing waits for your review.${own && ` ${own} that you or your API keys caused wait for another member.`}</span>`}</summary>
      <div class="stack">
      ${open && html`<p><strong>${open}</strong> wait${w.denials + w.failures === 1 ? 's' : ''} for a review, the oldest since <${Time} at=${w.oldest} relative />. <${Link} to="/audit?show=denied">See the denials<//></p>`}
      ${open && own && html`<p class="quiet">${own} that you or your API keys caused wait for another member.</p>`}
      <ul class="list">${Object.entries(subjects).filter(([, s]) => !s.scope || account.can(s.scope)).map(([id, s]) => html`
        <li key=${id}><span>${s.title} <span class="quiet">${s.due}; last ${w[s.last] ? html`<${Time} at=${w[s.last]} relative />` : 'never'}</span></span>
          <button type="button" aria-label=${`Record a review: ${s.title}`} onClick=${() => setSubject(id)}>${id === 'denials' && open ? 'Acknowledge' : 'Record a review'}</button></li>`)}</ul></div>
    </details>
    ${subject && html`<${Review} subject=${subject} waiting=${w} onClose=${() => setSubject(null)} onDone=${done} />`}`;
  }}<//>`;
}

function Review({subject, waiting, onClose, onDone}) {
  const [note, setNote] = useState('');
  const range = subject === 'denials' ? {from: waiting.from, to: waiting.to} : {};
  const record = async () => onDone(await post('/api/v2/audit/reviews', {subject, ...range, note: note || undefined}));
  return html`<${Dialog} title=${`Review: ${subjects[subject].title}`} onClose=${onClose}>
    <${Form} onSubmit=${record} submit="Record the review" cancel=${onClose}>
      ${subjects[subject].says(waiting)}
      <${Input} label="Note" optional hint="What you found or did. It is kept beside the log, and an owner or admin can erase it." maxlength="2000" value=${note} onInput=${setNote} />
    <//>
  <//>`;
}
