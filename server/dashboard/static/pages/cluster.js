// The SealedCredentials of the cluster, as the operator sees them.
import {Fragment, html, useEffect, useId, useState} from '../vendor/preact.js';
import {get} from '../lib/api.js';
import {count, number, visible} from '../lib/format.js';
import {Empty, Facts, Filter, Hash, Input, Link, Loaded, Name, Page, Pages, Panel, Skeleton, Tag, Time, setQuery, useHere, useLoad} from '../lib/ui.js';

const perPage = 50;

export function Cluster() {
  const {query} = useHere();
  const namespace = query.get('namespace') ?? '', cursor = query.get('cursor') ?? '', status = query.get('status') ?? '';
  const list = useLoad(signal => get('/api/v2/cluster/sealed-credentials', {namespace, status, cursor, limit: perPage}, signal), [namespace, status, cursor]);
  const seal = html`<${Link} class="button primary" to="/cluster/seal">Seal in the browser<//>`;
  return html`<${Page} title="Cluster" lead="The SealedCredentials of your Kubernetes namespaces: what each asks for, and how far the operator is with it. Values are not shown here." actions=${seal}>
    <${Loaded} of=${list} lines=${6}>${({operator, sealed_credentials: objects, sealing_keys: keys, next_cursor: next}) => !operator
      ? html`<${Empty} title="No operator runs in this deployment">
          <p>The operator brings SealedCredentials from a cluster into the vault. It runs when the service is installed in Kubernetes by its Helm chart, or when the configuration names a cluster (<code>kubernetes.kubeconfig</code>). Ask the operator of this service.</p>
          <p>You can seal values here all the same: the manifest works in any cluster that this deployment is connected to.</p>${seal}<//>`
      : html`
        <div class="filters"><${Namespace} value=${namespace} /><${Filter} label="Status" name="status" options=${[['', 'All'], ...Object.entries(statuses).map(([value, [, text]]) => [value, text])]} /></div>
        ${objects.length === 0 && list.loading ? html`<${Skeleton} lines=${6} />` : objects.length === 0 ? html`<${None} namespace=${namespace} status=${status} seal=${seal} />` : html`
          <${Objects} objects=${objects} />
          <${Pages} next=${next} shown=${count(objects.length, 'object')} />`}
        ${keys.length > 0 && html`<div class="apart"><${Keys} keys=${keys} /></div>`}`}<//>
  <//>`;
}

function Namespace({value}) {
  const [text, setText] = useState(value);
  useEffect(() => setText(value), [value]); // the back button changes it too
  const apply = e => {
    e.preventDefault();
    setQuery({namespace: text.trim(), cursor: ''});
  };
  return html`<form class="namespace" role="search" onSubmit=${apply}>
    <${Input} label="Namespace" required=${false} maxlength="63" autocapitalize="none" value=${text} onInput=${setText} />
    <button type="submit">Show</button>${value && html`<button type="button" onClick=${() => setQuery({namespace: '', cursor: ''})}>All namespaces</button>`}
  </form>`;
}

function None({namespace, status, seal}) {
  if (status) return html`<${Empty} title="No object has this status"><p>Choose another status above.</p><//>`;
  if (namespace) {
    return html`<${Empty} title=${html`Nothing in <${Name}>${namespace}<//>`}>
      <p>There is no SealedCredential in this namespace, or it does not belong to your organisation.</p>
      <${Link} class="button" to="/cluster">All namespaces<//><//>`;
  }
  return html`<${Empty} title="No SealedCredentials yet">
    <p>People see the namespaces that the configuration gives to their organisation. If you expect some here, ask the operator of this service to name them in <code>kubernetes.namespaces</code>, as in <code>shop: ten_…</code>. A namespace that is not named there is an organisation of its own.</p>
    <p>If they are named: seal values, and apply the manifest with <code>kubectl apply -f</code>.</p>${seal}<//>`;
}

// ---- an object

const sources = {sealed: 'sealed values', values_from: 'imported from a Secret', generate: 'made by the vault'};

// Statuses are those of kstatus, and Suspended.
const statuses = {Current: ['good', 'Current'], InProgress: ['warn', 'In progress'], Failed: ['bad', 'Failed'], Suspended: ['plain', 'Suspended']};

// How a condition is meant: those where true is good, and those where it is not.
const wanted = {Ready: 'True', TargetSynced: 'True', Stalled: 'False', ValuesStale: 'False', Expiring: 'False'};
const meanings = {
  Ready: ['The vault holds what is asked for', 'The vault does not hold what is asked for'], TargetSynced: ['The Secret is in step', 'The Secret is not in step'],
  Stalled: ['It cannot go on', 'It is not stalled'], Reconciling: ['It is being worked on', 'Nothing is being done'],
  ValuesStale: ['The values are too old', 'The values are new enough'], Expiring: ['The rotation is overdue', 'The rotation is on schedule'],
};

function kindOf(c) {
  if (c.status === 'Unknown' || !wanted[c.type]) return 'plain';
  return c.status === wanted[c.type] ? 'good' : c.type === 'Ready' || c.type === 'Stalled' ? 'bad' : 'warn';
}

function Condition({of: c}) {
  const type = visible(c.type);
  const [yes, no] = meanings[c.type] ?? [`${type} is true`, `${type} is not true`];
  return html`<li><div class="stack tight grow">
    <div class="row between"><span>${c.status === 'True' ? yes : c.status === 'False' ? no : `It is not known whether this is so: ${type}`}</span><${Tag} kind=${kindOf(c)}>${type} ${visible(c.status)}<//></div>
    ${c.message && html`<p><${Name}>${c.message}<//></p>`}
    <p class="quiet"><code>${visible(c.reason)}</code>, since <${Time} at=${c.last_transition_time} /></p>
  </div></li>`;
}

const Status = ({of: o}) => html`<${Tag} kind=${statuses[o.status]?.[0]}>${statuses[o.status]?.[1] ?? visible(o.status)}<//>`;

// Target is the Secret of an object, and whether it holds what the vault has.
function Target({of: o}) {
  if (!o.target_secret) return html`<span class="quiet">none</span>`;
  const synced = o.conditions.find(c => c.type === 'TargetSynced');
  const tag = !synced ? html`<${Tag}>not made yet<//>` : synced.status === 'True' ? html`<${Tag} kind="good">in step<//>` : html`<${Tag} kind=${synced.status === 'False' ? 'warn' : 'plain'}>${synced.status === 'False' ? 'drift' : 'not known'}<//>`;
  return html`<span class="row tight">${tag}<${Name}>${o.target_secret}<//></span>`;
}

// saying is what an object has to say in one line: what is wrong, before anything else.
function saying(o) {
  const wrong = o.conditions.find(c => kindOf(c) === 'bad') ?? o.conditions.find(c => kindOf(c) === 'warn');
  if (o.observed_generation < o.generation) return 'The newest change of the object has not been looked at yet.';
  return wrong?.message ?? '';
}

// Details are all that is known of an object.
const Details = ({of: o}) => html`<div class="stack">
  ${o.observed_generation < o.generation && html`<p class="notice">The newest change of the object has not been looked at yet: what is here is of the one before (generation ${number(o.observed_generation)} of ${number(o.generation)}).</p>`}
  <${Facts} of=${[
    ['Credential type', visible(o.credential_type)],
    ['Values', visible(`${sources[o.source] ?? o.source}${o.scope ? `, scope ${o.scope}` : ''}`)],
    ['Sealing key', o.key_id && html`<${Hash} label="Copy the key's id">${o.key_id}<//>`],
    ['Created', html`<${Time} at=${o.created_at} />`],
    ['Next rotation', o.next_rotation_at ? html`<${Time} at=${o.next_rotation_at} />` : 'not planned'],
    ['Expires', o.expires_at ? html`<${Time} at=${o.expires_at} />` : 'nothing to expire'],
  ]} />
  ${o.conditions.length === 0 ? html`<p class="quiet">The operator has said nothing of it yet.</p>` : html`<ul class="list">${o.conditions.map(c => html`<${Condition} key=${c.type} of=${c} />`)}</ul>`}
</div>`;

const columns = [
  ['Object', 'object', o => html`<span><strong><${Name}>${o.name}<//></strong> <span class="quiet">in <${Name}>${o.namespace}<//></span></span>`],
  ['Status', 'fit', o => html`<${Status} of=${o} />`],
  ['Target Secret', 'target', o => html`<${Target} of=${o} />`],
  ['Credential', 'fit', o => o.credential_id ? html`<${Link} to=${'/vault/' + encodeURIComponent(o.credential_id)}>version ${number(o.version)}<//>` : html`<span class="quiet">none yet</span>`],
  ['Message', 'message', o => saying(o) && html`<span title=${visible(saying(o))}><${Name}>${saying(o)}<//></span>`],
];

// Objects has one line for each object, under which its details unfold.
function Objects({objects}) {
  const [open, setOpen] = useState(new Set());
  const id = useId();
  const turn = key => setOpen(old => { const now = new Set(old); if (!now.delete(key)) now.add(key); return now; });
  return html`<div class="table dense objects" role="region" aria-label="SealedCredentials" tabindex="0"><table>
    <caption class="unseen">SealedCredentials</caption>
    <thead><tr>${columns.map(([title, kind]) => html`<th key=${title} scope="col" class=${kind}>${title}</th>`)}<th scope="col" class="fit"><span class="unseen">Details</span></th></tr></thead>
    <tbody>${objects.map((o, i) => {
      const key = `${o.namespace}/${o.name}`, shown = open.has(key);
      return html`<${Fragment} key=${key}>
        <tr>${columns.map(([title, kind, cell]) => html`<td key=${title} data-title=${title} class=${kind}>${cell(o)}</td>`)}
          <td class="fit" data-title="Details"><button type="button" class="small" aria-expanded=${shown} aria-controls=${shown ? `${id}-${i}` : undefined} aria-label=${visible(`Details of ${o.name} in ${o.namespace}`)} onClick=${() => turn(key)}><span aria-hidden="true">${shown ? '▾' : '▸'}</span></button></td></tr>
        ${shown && html`<tr class="unfolded" id=${`${id}-${i}`}><td colspan=${columns.length + 1} class="whole" data-title=""><${Details} of=${o} /></td></tr>`}<//>`;
    })}</tbody>
  </table></div>`;
}

// ---- sealing keys

const keyStates = {current: ['good', 'current', 'New values are sealed for it.'], former: ['warn', 'previous', 'Seal these values again (latticekeep reseal) before it is retired.'],
  unknown: ['bad', 'unknown', 'It is not of this deployment, so that these values do not open here. Seal them again.']};

const Keys = ({keys}) => html`<${Panel} title="Sealing keys in use">
  <ul class="list">${keys.map(k => {
    const [kind, text, what] = keyStates[k.state] ?? ['plain', k.state, ''];
    return html`<li key=${k.key_id}><span class="row"><${Tag} kind=${kind}>${text}<//><${Hash} label="Copy the key's id">${k.key_id}<//></span>
      <span>${count(k.objects, 'object')} of yours. <span class="quiet">${k.objects > 0 || k.state === 'current' ? what : ''}</span></span></li>`;
  })}</ul><//>`;
