// One audit entry: all that it says, and what can be proven of it.
import {html, useEffect, useRef, useState} from '../vendor/preact.js';
import {useAccount} from '../lib/account.js';
import {get} from '../lib/api.js';
import {count, number} from '../lib/format.js';
import {deed} from '../lib/words.js';
import {Actor, Fingerprint, Outcome, Resource, checkEntry, nextOf, openLog, previousOf, verdict} from '../lib/log.js';
import {idsOf, useNames} from '../lib/names.js';
import {Act, Copy, Empty, Facts, Hash, Link, Loaded, Name, Page, Panel, Table, Tag, Time, Trouble, navigate, say, save, useHere, useLoad} from '../lib/ui.js';

export function Entry() {
  const {params} = useHere();
  const sequence = /^[1-9][0-9]{0,15}$/.test(params.sequence) ? params.sequence : null;
  const loaded = useLoad(signal => sequence ? read(sequence, signal) : Promise.resolve(null), [sequence]);
  const missing = sequence === null || loaded.error?.status === 404;
  return html`<${Page} title=${sequence ? `Entry ${number(Number(sequence))}` : 'Audit entry'} back=${{to: '/audit', text: 'Audit log'}}
      actions=${loaded.data && html`<${Near} entry=${loaded.data} />`}>
    ${missing ? html`<${Empty} title="There is no such entry">
        <p>It does not exist, or belongs to somebody else, or has moved to the archive, which the operator of this service can read.</p>
        <${Link} class="button" to="/audit">Go to the audit log<//><//>`
    : html`<${Loaded} of=${loaded} lines=${8}>${entry => html`<${Said} entry=${entry} /><${Proven} entry=${entry} /><${Raw} entry=${entry} />`}<//>`}
  <//>`;
}

// read resolves to the entry that was asked for. All checks below hold for any other
// entry of the log too. Error: Problem.
async function read(sequence, signal) {
  const {entry} = await get('/api/v2/audit/entries/' + sequence, undefined, signal);
  if (entry.sequence !== Number(sequence)) throw new Error(`The server answered another entry than the one that was asked for, which is ${sequence}. Tell whoever operates the service.`);
  return entry;
}

// Near leads to the entries beside this one. They are looked for when somebody wants
// them, since each look at the log is recorded in it.
function Near({entry}) {
  const go = near => navigate('/audit/' + near.sequence);
  return html`
    ${entry.tenant_sequence > 1 && html`<${Act} onClick=${async () => {
      const previous = await previousOf(entry);
      if (previous) go(previous);
      else say('The entry before has moved to the archive.', 'warn');
    }}>← Previous<//>`}
    <${Act} onClick=${async () => go(await nextOf(entry.sequence))}>Next →<//>`;
}

function Said({entry: e}) {
  const account = useAccount();
  const names = useNames(idsOf([e]));
  const attributes = Object.entries(e.attributes).sort(([a], [b]) => a < b ? -1 : 1);
  return html`<div class="grid spaced">
    <${Panel} title=${deed(e)}>
      <${Facts} of=${[
        ['Time', html`<${Time} at=${e.timestamp} />, <${Time} at=${e.timestamp} relative />`],
        ['Outcome', html`<${Outcome} of=${e.outcome} />`],
        ['Event type', html`<code>${e.event_type}</code>`],
        ['Actor', html`<${Actor} of=${e.actor} mine=${account.user?.user_id} name=${names.get(e.actor.id)?.name} />${names.has(e.actor.id) && html` <${Hash} label="Copy the actor's id">${e.actor.id}<//>`}${e.actor.id && html` <${Link} to=${'/audit?user_id=' + encodeURIComponent(e.actor.id)}>all of this actor<//>`}`],
        ['Resource', html`<${Resource} of=${e.resource} name=${names.get(e.resource.id)?.name} />${names.has(e.resource.id) && html` <${Hash} label="Copy the resource's id">${e.resource.id}<//>`}${e.resource.id && html` <${Link} to=${'/audit?resource_id=' + encodeURIComponent(e.resource.id)}>all of this resource<//>`}`],
        ['Request id', e.request_id ? html`<${Hash} whole label="Copy the request id">${e.request_id}<//>` : html`<span class="quiet">none: the service did it by itself</span>`],
        ['Source address', e.source_ip ? html`<${Name}>${e.source_ip}<//>` : html`<span class="quiet">none: inside the service</span>`],
      ]} />
    <//>
    <${Panel} title="Attributes">
      ${attributes.length === 0 ? html`<p class="quiet">There is nothing more to say of this event.</p>`
      : html`<${Table} caption="Attributes of the event" rowKey="0" rows=${attributes} columns=${[
          {title: 'Attribute', class: 'fit', cell: ([key]) => html`<code>${key}</code>`}, {title: 'Value', cell: ([, value]) => value.length > 200 ? html`<${Hash} label="Copy the value">${value}<//> <span class="quiet">${count(value.length, 'character')}</span>` : html`<${Name}>${value}<//>`},
        ]} />`}
    <//>
  </div>
  <${Panel} title="Place in the log">
    <${Facts} of=${[
      ['Sequence', html`${number(e.sequence)} <span class="quiet">of the whole deployment</span>`],
      ['In your organisation', html`number ${number(e.tenant_sequence)}`],
      ['Organisation', html`<${Hash} label="Copy the organisation's id">${e.tenant_id}<//>`],
      ['Hash', html`<${Hash} whole label="Copy the hash">${e.hash}<//>`],
      ['Hash before, whole log', html`<${Hash} whole label="Copy the hash">${e.previous_hash}<//>`],
      ['Hash before, yours', html`<${Hash} whole label="Copy the hash">${e.tenant_previous_hash}<//>`],
      ['Salt', html`<${Hash} label="Copy the salt">${e.salt}<//> <span class="quiet">random, so that nobody guesses an entry from its hash</span>`],
      ['Signing key', html`<${Hash} label="Copy the key's id">${e.key_id}<//>`],
      ['Signature', html`<${Hash} label="Copy the signature">${e.signature}<//>`],
    ]} />
  <//>`;
}

const kinds = {good: 'holds', bad: 'does not hold', plain: 'not checked'};

function Proven({entry}) {
  const [state, setState] = useState({});
  const abort = useRef(null), box = useRef();
  useEffect(() => () => abort.current?.abort(), []);
  useEffect(() => { if (state.checks) box.current?.focus(); }, [state.checks]);
  const verify = async () => {
    abort.current?.abort();
    const {signal} = abort.current = new AbortController();
    setState({busy: true});
    try {
      const log = await openLog(entry.sequence, signal);
      const previous = entry.tenant_sequence === 1 ? null : await previousOf(entry, signal) ?? undefined;
      const checks = await checkEntry(log, entry, previous, signal);
      if (!signal.aborted) setState({log, checks});
    } catch (error) {
      if (!signal.aborted) setState({error});
    }
  };
  const {busy, error, checks, log} = state;
  return html`<${Panel} title="What can be proven" actions=${html`<button type="button" class="primary" disabled=${busy} onClick=${verify}>${busy ? 'Verifying…' : checks ? 'Verify again' : 'Verify in this browser'}</button>`}>
    ${!checks && html`<p class="quiet">This page computes the hash itself, and checks the signature, the link to the entry before, and the place in the tree of the signed checkpoint. It believes nothing of the server that it can compute.</p>`}
    ${error && html`<${Trouble} error=${error} retry=${verify} />`}
    ${checks && html`
      <p tabindex="-1" ref=${box} role="status">${{
        good: html`<${Tag} kind="good">verified<//> This entry is what was written, by this log, at this place.`,
        bad: html`<${Tag} kind="bad">does not verify<//> The entry, or what the server shows of it, was changed. Keep what you see here and tell whoever operates the service.`,
        plain: html`<${Tag} kind="warn">not wholly checked<//> What was checked holds.`,
      }[verdict(checks)]}</p>
      <ul class="list">${checks.map(c => html`<li key=${c.part}><div class="stack tight grow">
        <div class="row between"><strong>${c.title}</strong><${Tag} kind=${c.kind}>${kinds[c.kind]}<//></div>
        <p>${c.found}</p>
        ${c.kind === 'good' && html`<p class="quiet">What it proves: ${c.proves}</p>`}
      </div></li>`)}</ul>
      <${Facts} of=${[['Checkpoint', html`${count(log.checkpoint.size, 'entry', 'entries')}, signed, of <${Time} at=${log.checkpoint.time} />`]]} />
      <${Fingerprint} word="Fingerprint of the log" value=${log.fingerprint} hint="From the operator of this service, on a way other than this page. Without that it is proven only that the log agrees with itself." />`}
  <//>`;
}

function Raw({entry}) {
  const text = JSON.stringify(entry, null, 2);
  return html`<${Panel} title="As it was recorded" actions=${html`<${Copy} text=${text} label="Copy the JSON" /><button type="button" onClick=${() => save(`audit-entry-${entry.sequence}.json`, text + '\n', 'application/json')}>Download</button>`}>
    <details><summary>JSON</summary><pre tabindex="0" aria-label="The entry as JSON">${text}</pre></details>
  <//>`;
}
