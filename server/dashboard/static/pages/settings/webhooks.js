// Webhooks: addresses that are told what happens, and how each delivery went.
import {html, useState} from '../../vendor/preact.js';
import {unverified, useAccount} from '../../lib/account.js';
import {del, get, post} from '../../lib/api.js';
import {number, visible} from '../../lib/format.js';
import {Act, Confirm, Copy, Dialog, Empty, Form, Hash, Input, Link, Loaded, Name, Panel, Table, Tag, Time, say, useAsked, useHere, useLoad} from '../../lib/ui.js';

const at = (id, more = '') => '/api/v2/webhooks/' + encodeURIComponent(id) + more;
const called = hook => hook.host === '' ? hook.webhook_id : visible(hook.host);
const limited = {403: 'Events are about all paths of the organisation. Only somebody whom no policy limits creates a webhook, and not after the trial has ended.'};

export function Webhooks() {
  const account = useAccount();
  const {query} = useHere();
  const hooks = useLoad(signal => get('/api/v2/webhooks', undefined, signal), []);
  const [making, setMaking] = useAsked({create: account.writes});
  const [made, setMade] = useState(null);
  const [deleting, setDeleting] = useState(null);
  const [turn, setTurn] = useState(0); // counts the events that were sent from here
  const chosen = hooks.data?.webhooks.find(h => h.webhook_id === query.get('webhook'));
  return html`<${Panel} title="Webhooks" actions=${html`<button type="button" class="primary" disabled=${!account.writes} onClick=${() => setMaking(true)}>Create a webhook</button>`}>
      <p class="quiet">A webhook tells an address of yours which credentials expire soon: 30, 7 and 1 days before. Events have ids and times, no names and no values.</p>
      <${Loaded} of=${hooks}>${({webhooks: list}) => list.length === 0
        ? html`<${Empty} title="No webhooks yet"><p>Create one for each channel or program that is to be told.</p><//>`
        : html`<${Table} caption="List of webhooks" rowKey="webhook_id" rows=${list} columns=${[
            {title: 'Host', class: 'once words', cell: h => h.host === '' ? html`<${Tag} kind="bad">damaged: delete it<//>` : html`<${Name}>${h.host}<//>`},
            {title: 'Description', cell: h => h.description && html`<${Name}>${h.description}<//>`},
            {title: 'Id', class: 'once', cell: h => html`<${Hash} label="Copy the id">${h.webhook_id}<//>`},
            {title: 'Created', class: 'once', cell: h => html`<${Time} at=${h.created_at} short />`},
            {title: 'Actions', hidden: true, class: 'fit', cell: h => html`<span class="actions">
              <${Link} class="button" to=${'/settings/webhooks?webhook=' + encodeURIComponent(h.webhook_id)} aria-label=${'Deliveries to ' + called(h)} aria-current=${h === chosen ? 'true' : undefined}>Deliveries<//>
              ${h.host !== '' && html`<${Act} disabled=${!account.writes} aria-label=${'Send a test event to ' + called(h)} done="The test event is on its way" onClick=${async () => {
                await post(at(h.webhook_id, '/test'));
                setTurn(n => n + 1);
              }}>Send a test<//>`}
              <button type="button" class="danger" aria-label=${'Delete the webhook to ' + called(h)} onClick=${() => setDeleting(h)}>Delete</button></span>`},
          ]} />`}<//>
      ${making && html`<${CreateWebhook} onClose=${() => setMaking(false)} onMade=${hook => { setMaking(false); setMade(hook); hooks.reload(); }} />`}
      ${made && html`<${MadeWebhook} made=${made} onClose=${() => setMade(null)} />`}
      ${deleting && html`<${Confirm} title="Delete this webhook?" action="Delete" onClose=${() => setDeleting(null)} onConfirm=${async () => {
          await del(at(deleting.webhook_id));
          say('The webhook is deleted');
          hooks.reload();
        }}><p><${Name}>${called(deleting)}<//> is told nothing any more. Deliveries that wait are not made. This cannot be undone.</p><//>`}
    <//>
    ${chosen && html`<${Deliveries} key=${chosen.webhook_id} of=${chosen} turn=${turn} />`}`;
}

function CreateWebhook({onClose, onMade}) {
  const account = useAccount();
  const [url, setURL] = useState('');
  const [description, setDescription] = useState('');
  return html`<${Dialog} title="Create a webhook" onClose=${onClose}>
    <${Form} submit="Create" cancel=${onClose} texts=${{...limited, ...unverified(account)}} onSubmit=${async () => onMade(await post('/api/v2/webhooks', {url, description: description || undefined}))}>
      <${Input} label="URL" type="url" maxlength="2048" hint="The whole address, with https. It is a public one unless the operator of this service allows others. Lists show its host only, because the rest may hold a token." value=${url} onInput=${setURL} autofocus />
      <${Input} label="Description" optional maxlength="255" hint="Who or what is told." value=${description} onInput=${setDescription} />
    <//>
  <//>`;
}

// MadeWebhook shows a secret for the only time, so that only its button closes it.
const MadeWebhook = ({made, onClose}) => html`<${Dialog} title="Your new webhook" onClose=${onClose} fixed>
  <div class="stack">
    <p>Events to <${Name}>${made.webhook.host}<//> are signed with this secret. It is shown this once: copy it now to where the receiver finds it.</p>
    <code class="secret" data-testid="webhook-secret">${made.secret}</code>
    <div class="actions"><${Copy} text=${made.secret} label="Copy the secret" /></div>
    <p class="quiet">Requests follow Standard Webhooks, whose libraries verify them.</p>
    <div class="actions"><button type="button" class="primary" onClick=${onClose}>I have stored it</button></div>
  </div>
<//>`;

const states = {waiting: ['warn', 'waiting'], delivered: ['good', 'delivered'], dead: ['bad', 'dead letter']};

// Why there was no answer, and what to do.
const reasons = {
  unreachable: 'Nobody answers. Check the name and the port, and whether the address is public.',
  tls: 'The certificate or the version of TLS is not accepted.',
  timeout: 'No answer within 10 seconds.',
  no_http: 'The answer is not HTTP, or its header is too large.',
};

const answerOf = d => d.status ? html`${d.status}` : d.reason ? html`<code>${d.reason}</code> <span class="quiet">${reasons[d.reason]}</span>` : html`<span class="quiet">none yet</span>`;

function Deliveries({of, turn}) {
  const account = useAccount();
  const deliveries = useLoad(signal => get(at(of.webhook_id, '/deliveries'), undefined, signal), [turn]);
  const resend = async d => {
    await post(at(of.webhook_id, `/deliveries/${encodeURIComponent(d.delivery_id)}/resend`));
    deliveries.reload();
  };
  return html`<${Panel} title=${`Deliveries to ${called(of)}`} actions=${html`<button type="button" onClick=${deliveries.reload}>Load again</button>`}>
    <${Loaded} of=${deliveries}>${({deliveries: list}) => list.length === 0 ? html`<p class="quiet">Nothing was sent in the last 30 days.</p>`
      : html`<${Table} caption="Deliveries" rowKey="delivery_id" rows=${list} columns=${[
          {title: 'Event', class: 'words', cell: d => html`<span><code>${visible(d.event)}</code> <span class="quiet">made <${Time} at=${d.created_at} relative /></span></span>`},
          {title: 'State', cell: d => html`<${Tag} kind=${states[d.state]?.[0]}>${states[d.state]?.[1] ?? d.state}<//>`},
          {title: 'Attempts', cell: d => number(d.attempts)},
          {title: 'Last answer', class: 'told', cell: answerOf},
          {title: 'Last attempt', class: 'once', cell: d => html`<${Time} at=${d.tried_at} relative />`},
          {title: 'Next attempt', class: 'once', cell: d => d.state !== 'waiting' ? html`<span class="quiet">none</span>` : d.next_at ? html`<${Time} at=${d.next_at} relative />` : 'at once'},
          {title: 'Actions', hidden: true, class: 'fit', cell: d => d.state === 'dead' && html`<${Act} disabled=${!account.writes} aria-label=${'Send again: ' + d.delivery_id} done="The event is sent again" onClick=${() => resend(d)}>Send again<//>`},
        ]} />`}<//>
  <//>`;
}
