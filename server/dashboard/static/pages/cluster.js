// The SealedCredentials of the cluster, as the operator sees them.
import {html, useEffect, useState} from '../vendor/preact.js';
import {get} from '../lib/api.js';
import {count, number, visible} from '../lib/format.js';
import {Empty, Facts, Hash, Input, Link, Loaded, Name, Page, Pages, Panel, Skeleton, Table, Tag, Time, setQuery, useHere, useLoad} from '../lib/ui.js';

const perPage = 50;

export function Cluster() {
  const {query} = useHere();
  const namespace = query.get('namespace') ?? '', cursor = query.get('cursor') ?? '';
  const list = useLoad(signal => get('/api/v2/cluster/sealed-credentials', {namespace, cursor, limit: perPage}, signal), [namespace, cursor]);
  const seal = html`<${Link} class="button primary" to="/cluster/seal">Seal in the browser<//>`;
  return html`<${Page} title="Cluster" lead="The SealedCredentials of your Kubernetes namespaces: what each asks for, and how far the operator is with it. Values are not shown here." actions=${seal}>
    <${Loaded} of=${list} lines=${6}>${({operator, sealed_credentials: objects, sealing_keys: keys, next_cursor: next}) => !operator
      ? html`<${Empty} title="No operator runs in this deployment">
          <p>The operator brings SealedCredentials from a cluster into the vault. It runs when the service is installed in Kubernetes by its Helm chart, or when the configuration names a cluster (<code>kubernetes.kubeconfig</code>). Ask the operator of this service.</p>
          <p>You can seal values here all the same: the manifest works in any cluster that this deployment is connected to.</p>${seal}<//>`
      : html`
        <${Namespace} value=${namespace} />
        ${objects.length === 0 && list.loading ? html`<${Skeleton} lines=${6} />` : objects.length === 0 ? html`<${None} namespace=${namespace} seal=${seal} />` : html`
          <${Table} caption="SealedCredentials" rowKey="id" columns=${columns} rows=${objects.map(o => ({...o, id: `${o.namespace}/${o.name}`}))} />
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
  return html`<form class="filters" role="search" onSubmit=${apply}>
    <${Input} label="Namespace" required=${false} maxlength="63" autocapitalize="none" value=${text} onInput=${setText} />
    <div class="actions"><button type="submit">Show</button>${value && html`<button type="button" onClick=${() => setQuery({namespace: '', cursor: ''})}>All namespaces</button>`}</div>
  </form>`;
}

function None({namespace, seal}) {
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

const is = (o, type, status = 'True') => o.conditions.some(c => c.type === type && c.status === status);

function state(o) {
  if (o.suspended) return ['plain', 'suspended'];
  if (is(o, 'Stalled')) return ['bad', 'stalled'];
  if (is(o, 'Ready', 'False')) return ['bad', 'not ready'];
  if (is(o, 'TargetSynced', 'False') || is(o, 'Expiring') || is(o, 'ValuesStale')) return ['warn', 'needs attention'];
  if (is(o, 'Ready')) return ['good', 'ready'];
  return ['plain', 'not seen yet'];
}

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

function State({of: o}) {
  const [kind, text] = state(o);
  // What is wrong is said at once, without opening anything.
  const wrong = o.conditions.find(c => kindOf(c) === 'bad') ?? o.conditions.find(c => kindOf(c) === 'warn');
  return html`<div class="stack tight"><p><${Tag} kind=${kind}>${text}<//></p>
    ${wrong?.message && html`<p><${Name}>${wrong.message}<//></p>`}
    ${o.observed_generation < o.generation && html`<p class="quiet">The newest change of the object has not been looked at yet.</p>`}
    ${o.conditions.length > 0 && html`<details><summary>${count(o.conditions.length, 'condition')}</summary>
      <ul class="list">${o.conditions.map(c => html`<${Condition} key=${c.type} of=${c} />`)}</ul></details>`}
  </div>`;
}

const columns = [
  {title: 'Object', cell: o => html`<div class="stack tight">
    <strong><${Name}>${o.name}<//></strong><span class="quiet">in <${Name}>${o.namespace}<//></span>
    <span>${visible(`${o.credential_type}, ${sources[o.source] ?? o.source}${o.scope ? `, scope ${o.scope}` : ''}`)}</span></div>`},
  {title: 'State', cell: o => html`<${State} of=${o} />`},
  {title: 'Credential', class: 'fit', cell: o => o.credential_id ? html`<${Link} to=${'/vault/' + encodeURIComponent(o.credential_id)}>version ${number(o.version)}<//>` : html`<span class="quiet">none yet</span>`},
  {title: 'Target Secret', cell: o => o.target_secret ? html`<${Name}>${o.target_secret}<//>` : html`<span class="quiet">none</span>`},
  {title: 'Next rotation', cell: o => o.next_rotation_at ? html`<${Time} at=${o.next_rotation_at} relative />` : html`<span class="quiet">not planned</span>`},
  {title: 'Expires', cell: o => o.expires_at ? html`<${Time} at=${o.expires_at} relative />` : html`<span class="quiet">nothing to expire</span>`},
];

// ---- sealing keys

const keyStates = {current: ['good', 'current', 'New values are sealed for it.'], former: ['warn', 'former', 'Seal these values again (latticekeep reseal) before it is retired.'],
  unknown: ['bad', 'unknown', 'It is not of this deployment, so that these values do not open here. Seal them again.']};

const Keys = ({keys}) => html`<${Panel} title="Sealing keys in use">
  <ul class="list">${keys.map(k => {
    const [kind, text, what] = keyStates[k.state] ?? ['plain', k.state, ''];
    return html`<li key=${k.key_id}><span class="row"><${Tag} kind=${kind}>${text}<//><${Hash} label="Copy the key's id">${k.key_id}<//></span>
      <span>${count(k.objects, 'object')} of yours. <span class="quiet">${k.objects > 0 || k.state === 'current' ? what : ''}</span></span></li>`;
  })}</ul><//>`;
