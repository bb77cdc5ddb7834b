// The report builder: what a report is of is chosen, and what it will contain is seen before it is made.
import {html, useEffect, useRef, useState} from '../vendor/preact.js';
import {useAccount} from '../lib/account.js';
import {get} from '../lib/api.js';
import {count, localDay, number} from '../lib/format.js';
import {Proof} from '../lib/log.js';
import {frameworks} from '../lib/words.js';
import {Act, Choice, Empty, Facts, Form, Gauge, Hash, Input, Link, Loaded, Name, Page, Panel, Tag, Time, useHere, useLoad} from '../lib/ui.js';

// Formats of reports, and who takes which.
const formats = {
  pdf: ['PDF', 'for people'], oscal: ['OSCAL', "assessment results in NIST's OSCAL JSON"], ksi: ['KSI', "FedRAMP's key security indicators in JSON; it has no place for organisation and period"],
};

const today = () => new Date().toISOString().slice(0, 10); // in UTC, as reports have days
const dayOf = time => new Date(time).toISOString().slice(0, 10);
const written = date => localDay(date + 'T12:00:00'); // a day stays that day in every zone

// preview returns the score as of the end of the period. The head of a day that is over is its last entry.
async function preview({framework, to, head}, signal) {
  let at = head;
  if (to !== '' && to < today()) {
    const {entries} = await get('/api/v2/audit/logs', {to: to + 'T23:59:59.999999Z', limit: 1}, signal);
    if (entries.length === 0) return null;
    at = entries[0].sequence;
  } else if (to !== '') at = undefined;
  return get('/api/v2/compliance/score', {framework, head: at}, signal);
}

export function ReportBuilder() {
  const account = useAccount();
  const {query} = useHere();
  const own = account.tenant.name, head = query.get('head') ?? undefined;
  const first = {framework: Object.hasOwn(frameworks, query.get('framework') ?? '') ? query.get('framework') : 'soc2', from: '', to: '', organisation: own, head};
  const [form, setForm] = useState(first);
  const [asked, setAsked] = useState(first);
  const [wrong, setWrong] = useState('');
  const score = useLoad(signal => preview(asked, signal), [asked]);
  const set = name => value => { setForm(f => ({...f, [name]: value})); setWrong(''); };
  const show = async () => {
    if (form.from !== '' && form.from > (form.to || today())) {
      setWrong('The period begins after its end.');
      throw new Error('Correct what is marked.');
    }
    setAsked({...form, organisation: form.organisation.trim() || own});
  };
  const changed = JSON.stringify({...form, organisation: form.organisation.trim() || own}) !== JSON.stringify(asked);
  return html`<${Page} title="Report for an auditor" back=${{to: '/compliance', text: 'Compliance'}}
      lead="Choose what the report is of, look at what it will contain, and make it. It has its evidence, entry by entry, and is made of the log alone.">
    <${Panel} title="What the report is of">
      <${Form} onSubmit=${show} submit="Preview" novalidate>
        <div class="filters wide">
          <${Choice} label="Framework" value=${form.framework} onInput=${set('framework')} options=${Object.entries(frameworks)} />
          <${Input} label="Organisation" hint="On the cover. Another name than that of your account is marked as stated by you" optional maxlength="200" value=${form.organisation} onInput=${set('organisation')} />
          <${Input} label="First day of the period (UTC)" optional type="date" max=${today()} value=${form.from} error=${wrong} onInput=${set('from')} />
          ${account.can('audit:read') && html`<${Input} label="Last day of the period (UTC)" hint=${head ? `As of entry ${number(Number(head))} if left out` : 'Now if left out'} optional type="date" max=${today()} value=${form.to} onInput=${set('to')} />`}
        </div>
      <//>
    <//>
    <${Loaded} of=${score} lines=${6}>${s => s === null
      ? html`<${Empty} title="There is nothing to report"><p>The log has no entry of your organisation up to this day. Choose a later one.</p><//>`
      : html`<${Preview} of=${s} asked=${asked} own=${own} />
        ${s.score !== null || s.proof.status === 'verified' || s.proof.status === 'disabled' ? html`<${Formats} key=${JSON.stringify([asked, s.head.sequence])} of=${s} asked=${asked} own=${own} changed=${changed} />` : null}`}<//>
  <//>`;
}

const results = [['fail', 'failed', 'bad'], ['pass', 'passed', 'good'], ['no_data', 'without data yet', 'warn'], ['not_applicable', 'not applicable', 'plain'], ['manual', 'for a person to judge', 'plain']];

// Preview says what the report will contain.
function Preview({of: s, asked, own}) {
  const days = Math.max(0, ...s.controls.flatMap(c => c.probes).map(p => p.window_days));
  return html`<${Panel} title="What it will contain">
    ${s.score === null && html`<p class="notice">The score is withheld: ${s.reason}.</p>`}
    <div class="row">
      <${Gauge} value=${s.score} label="Score" unit=${s.provisional ? 'provisional' : 'of 100'} neutral=${s.provisional} />
      <${Gauge} value=${s.coverage.percent} label="Coverage" unit="% covered" neutral />
    </div>
    <${Facts} of=${[
      ['Framework', `${frameworks[asked.framework]}, ${s.version}`],
      ['Organisation', html`<${Name}>${asked.organisation}<//>${asked.organisation !== own && html` <${Tag} kind="warn">stated by you<//>`}`],
      ['Period', asked.from ? `${written(asked.from)} to ${written(dayOf(s.head.timestamp))} (UTC)` : html`Up to ${written(dayOf(s.head.timestamp))} (UTC), without a first day`],
      ['Head', html`<${Link} to=${'/audit/' + s.head.sequence}>entry ${number(s.head.sequence)}<//>, <${Time} at=${s.head.timestamp} />`],
      ['Hash of the head', html`<${Hash} label="Copy the hash">${s.head.hash}<//>`],
      ['Log', html`<${Proof} of=${s.proof} />`],
      ['Controls', html`${count(s.coverage.controls, 'control')}: ${results.map(([r, text, kind]) => [s.controls.filter(c => c.result === r).length, text, kind]).filter(([n]) => n > 0)
        .map(([n, text, kind]) => html`<${Tag} key=${text} kind=${kind}>${number(n)} ${text}<//> `)}`],
    ]} />
    <p class="quiet">The score and the results are those of the head, at the end of the period, and not of the period. ${days > 0 ? `Probes look back over windows of their own, ${count(days, 'day')} at most; each says how far. ` : ''}${asked.from ? 'The history of the score begins with the period.' : ''}</p>
  <//>`;
}

// Expiry says when links end, in minutes.
function Expiry({at}) {
  const [, tick] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => tick(n => n + 1), 20_000);
    return () => clearInterval(timer);
  }, []);
  const minutes = Math.ceil((new Date(at).getTime() - Date.now()) / 60_000);
  return html`<span class="quiet">${minutes > 0 ? html`Links expire in ${count(minutes, 'minute')}. Whoever has them can fetch the report until <${Time} at=${at} short />.` : 'The links have expired. Preview and make the report again.'}</span>`;
}

// Formats makes reports. The address of one ends after an hour, and whoever has it can fetch the report: so it is asked
// for when it is wanted.
function Formats({of: s, asked, own, changed}) {
  const [made, setMade] = useState({});
  const list = useRef();
  useEffect(() => { // the link takes the place of the button, and its focus
    const last = Object.keys(made).at(-1);
    if (last && document.activeElement === document.body) list.current.querySelector(`[data-format=${last}]`).focus();
  }, [made]);
  const make = async format => {
    const about = format === 'ksi' ? {} : {from: asked.from, organisation: asked.organisation === own ? '' : asked.organisation};
    const report = await get('/api/v2/compliance/report', {framework: asked.framework, head: s.head.sequence, format, ...about});
    setMade(all => ({...all, [format]: report}));
  };
  const offered = Object.keys(formats).filter(f => f !== 'ksi' || asked.framework === 'fedramp');
  return html`<${Panel} title="Make the report">
    ${changed && html`<p class="notice">You have changed what the report is of. Preview it first: what is made here is what the preview shows.</p>`}
    <p class="quiet">Beside each report lies a signature of the deployment (ML-DSA-65 by its identity key, context <code>latticekeep/report/v1</code>), which shows that it was not changed.</p>
    <ul class="list" aria-live="polite" ref=${list}>${offered.map(format => html`<li key=${format}>
      <span><strong>${formats[format][0]}</strong> <span class="quiet">${formats[format][1]}</span></span>
      ${made[format] ? html`<span class="row"><a class="button primary" data-format=${format} href=${made[format].url} download>Download ${formats[format][0]}</a><a href=${made[format].signature_url} download>Download its signature</a>
          <${Expiry} at=${made[format].expires_at} /></span>`
      : html`<${Act} onClick=${() => make(format)} texts=${{409: 'No report is made of a log that does not verify. Tell the operator of this service at once.', 503: 'The log is not verified up to this entry yet. Wait a minute and try again.'}}>Make the ${formats[format][0]} report<//>`}
    </li>`)}</ul>
  <//>`;
}
