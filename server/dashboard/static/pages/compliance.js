// Compliance: what the log is evidence for, by framework.
import {html, useState} from '../vendor/preact.js';
import {get} from '../lib/api.js';
import {Trend} from '../lib/charts.js';
import {count, number} from '../lib/format.js';
import {frameworks} from '../lib/words.js';
import {Proof} from '../lib/log.js';
import {Failures, failsFor, failuresOf, jobs} from '../lib/failures.js';
import {Choice, Empty, Facts, Filter, Gauge, Hash, Link, Loaded, Page, Panel, Skeleton, Table, Tag, Time, Trouble, useHere, useLoad} from '../lib/ui.js';

const lead = 'How much of what this service can see went well. A score is evidence for controls of a framework; it does not say that the framework is met.';

const coverage = ({evidenced, controls, percent}) => `${number(evidenced)} of ${count(controls, 'control')} (${Math.round(percent)} %)`;

// Numbers shows a score and its coverage, which is worth as much.
const Numbers = ({of: s, name}) => html`<div class="row">
  <${Gauge} value=${s.score} label=${name} unit=${s.provisional ? 'provisional' : 'of 100'} neutral=${s.provisional} />
  <${Gauge} value=${s.coverage.percent} label=${`${name}, coverage`} unit="% covered" neutral />
</div>`;

const provisional = 'Provisional: the deployment has not been assessed in this log yet, so its controls are left out. That happens once a day, and before a score on demand.';

// Bar is a share of 100 beside its number.
const Bar = ({value, neutral}) => html`<svg class="bar" viewBox="0 0 100 6" preserveAspectRatio="none" aria-hidden="true"><rect class="track" width="100" height="6" />
  <rect class=${neutral ? 'neutral' : value >= 80 ? 'good' : value >= 50 ? 'warn' : 'bad'} width=${value} height="6" /></svg>`;

// Failing is how many controls fail for reasons that are the job of who, with a link to them.
function Failing({of: s, who, failing}) {
  const n = s.controls.filter(c => failsFor(c, who, failing)).length;
  if (s.score === null) return html`<span class="quiet">–</span>`;
  return n === 0 ? html`<span class="quiet">none</span>` : html`<${Link} to=${`/compliance/${s.framework}?result=fail&job=${who}`}>${count(n, 'control')}<span class="unseen"> of ${frameworks[s.framework]}, a job of ${jobs[who][1]}</span><//>`;
}

const columns = failing => [
  {title: 'Framework', class: 'edged', cell: s => html`<span title=${s.version}><strong><${Link} to=${'/compliance/' + s.framework}>${frameworks[s.framework]}<//></strong> <span class="quiet edition">${s.version}</span></span>`},
  {title: 'Score', cell: s => s.score === null ? html`<${Tag} kind="warn">withheld<//>`
    : html`<span class="scored"><strong>${Math.round(s.score * 10) / 10}</strong><${Bar} value=${s.score} neutral=${s.provisional} />${s.provisional && html` <${Tag} kind="warn">provisional<//>`}</span>`},
  {title: 'Coverage', cell: s => html`<span class="scored"><span>${Math.round(s.coverage.percent)} %</span><${Bar} value=${s.coverage.percent} neutral /><span class="quiet">${number(s.coverage.evidenced)} of ${number(s.coverage.controls)}</span></span>`},
  {title: 'You fix', class: 'fit', cell: s => html`<${Failing} of=${s} who="tenant" failing=${failing} />`},
  {title: 'The operator fixes', class: 'fit', cell: s => html`<${Failing} of=${s} who="deployment" failing=${failing} />`},
];

export function Compliance() {
  const {data: all, error: stopped, reload: again} = useLoad(signal => get('/api/v2/compliance/scores', undefined, signal), []);
  return html`<${Page} title="Compliance" lead=${lead} actions=${html`${all && html`<button type="button" onClick=${again}>Re-evaluate</button>`}<${Link} class="button primary" to="/compliance/report">Report for an auditor<//>`}>
    ${stopped && html`<div class="spaced"><${Trouble} error=${stopped} retry=${again} /></div>`}
    ${all ? html`<${Glance} of=${all} />` : !stopped && html`<${Skeleton} lines=${9} />`}
  <//>`;
}

function Glance({of: {scores, probes, head, proof}}) {
  const failing = new Map(probes.filter(p => p.result === 'fail').map(p => [p.name, p]));
  const withheld = scores.find(s => s.score === null);
  return html`
    <p class="quiet">As of <${Link} to=${'/audit/' + head.sequence}>entry ${number(head.sequence)}<//>, <${Time} at=${head.timestamp} />. Log <${Proof} of=${proof} /></p>
    <p class="quiet spaced">A failing control counts for whoever has to fix it, and for both where it has two causes.</p>
    <${Table} dense caption="Scores of all frameworks" rowKey="framework" rows=${scores} columns=${columns(failing)} />
    ${withheld?.reason && html`<p class="notice apart">Withheld: ${withheld.reason}.</p>`}
    ${scores.some(s => s.provisional) && !withheld && html`<p class="notice apart">${provisional}</p>`}
    ${!withheld && html`<div class="apart"><${Failures} failures=${failuresOf(scores, probes)} /></div>`}`;
}

// ---- one framework

const results = {
  fail: ['bad', 'failed'], pass: ['good', 'passed'], no_data: ['warn', 'no data yet'], not_applicable: ['plain', 'not applicable'], manual: ['plain', 'for a person to judge'],
};

const Result = ({of}) => html`<${Tag} kind=${results[of]?.[0]}>${results[of]?.[1] ?? of}<//>`;

export function Framework() {
  const {params, query} = useHere();
  const framework = params.framework;
  const name = Object.hasOwn(frameworks, framework) ? frameworks[framework] : null;
  const head = query.get('head');
  const score = useLoad(signal => name ? get('/api/v2/compliance/score', {framework, head}, signal) : Promise.resolve(null), [framework, head]);
  const back = {to: '/compliance', text: 'Compliance'};
  if (!name) return html`<${Page} title="Compliance" back=${back}><${Empty} title="There is no such framework"><p>Choose one of the nine that there are.</p><${Link} class="button" to="/compliance">All frameworks<//><//><//>`;
  return html`<${Page} title=${name} back=${back} lead=${`This is evidence for controls of ${name} from the audit log of this service. It is not a statement that ${name} is met: most of a framework lies outside this service, and a log shows that a control operated, not that it was designed well.`}
      actions=${html`<button type="button" onClick=${score.reload}>Re-evaluate</button><${Link} class="button primary" to=${`/compliance/report?framework=${framework}${head ? `&head=${encodeURIComponent(head)}` : ''}`}>Report for an auditor<//>`}>
    <${Loaded} of=${score} lines=${6}>${s => html`
      ${head && html`<p class="notice">This is the score as of entry ${number(s.head.sequence)}. <${Link} to=${'/compliance/' + framework}>Show the newest<//></p>`}
      <div class="grid spaced">
        <${Panel} title="Score">
          <div class="stack"><${Numbers} of=${s} name=${name} />
            ${s.provisional && s.score !== null && html`<p class="notice">${provisional}</p>`}
            <p>${s.score === null ? html`<strong>Withheld.</strong> ${s.reason}` : html`<span class="quiet">The weight of the controls that passed, of those that passed or failed.</span>`}</p></div>
          <${Facts} of=${[
            ['Edition', s.version],
            ['Evidence for', coverage(s.coverage)],
            ['Log', html`<${Proof} of=${s.proof} /> ${s.proof.verified_to > 0 && `up to entry ${number(s.proof.verified_to)}`}${s.proof.verified_at && html`, <${Time} at=${s.proof.verified_at} relative />`}`],
            ['As of', html`<${Link} to=${'/audit/' + s.head.sequence}>entry ${number(s.head.sequence)}<//>, <${Time} at=${s.head.timestamp} />`],
            ['Hash of that entry', html`<${Hash} label="Copy the hash">${s.head.hash}<//>`],
          ]} />
        <//>
        <${History} framework=${framework} name=${name} />
      </div>
      ${s.score !== null && html`<${Failures} failures=${failures(s)} />`}
      <${Controls} controls=${s.controls} />`}<//>
  <//>`;
}

// failures are those of one framework, whose controls have their probes in them.
function failures(s) {
  const probes = new Map(s.controls.flatMap(c => c.probes).map(p => [p.name, p]));
  return failuresOf([{...s, controls: s.controls.map(c => ({...c, probes: c.probes.map(p => p.name)}))}], [...probes.values()]);
}

const daysBetween = (first, last) => Math.round((new Date(last) - new Date(first)) / 86400e3) + 1;

function History({framework, name}) {
  const history = useLoad(signal => get('/api/v2/compliance/history', {framework}, signal), [framework]);
  return html`<${Panel} title="Trend"><${Loaded} of=${history}>${({scores}) => html`
    ${scores.length > 1 && html`<p class="quiet">${count(scores.length, 'day')} with a score, over ${count(daysBetween(scores[0].date, scores.at(-1).date), 'day')}.</p>`}
    <${Trend} scores=${scores} name=${name} to=${s => `/compliance/${framework}?head=${s.sequence}`} />`}<//><//>`;
}

function Controls({controls}) {
  const {query} = useHere();
  const result = query.get('result') ?? '';
  const profiles = [...new Set(controls.map(c => c.profile).filter(Boolean))];
  const [profile, setProfile] = useState('');
  const inProfile = controls.filter(c => profile === '' || c.profile === profile);
  const job = query.get('job') ?? '';
  const failsOf = (c, who) => c.probes.some(p => p.result === 'fail' && p.responsible === who);
  const shown = inProfile.filter(c => (result === '' || c.result === result) && (job === '' || failsOf(c, job)));
  const having = r => inProfile.filter(c => c.result === r).length;
  return html`<${Panel} title="Controls">
    <div class="filters narrow">
      <${Filter} label="Result" name="result" options=${[['', `All (${inProfile.length})`], ...Object.keys(results).map(r => [r, `${results[r][1].replace(/^./, c => c.toUpperCase())} (${having(r)})`])]} />
      <${Filter} label="To be fixed by" name="job" options=${[['', 'All'], ...Object.keys(jobs).map(who => [who, `${jobs[who][0]} (${inProfile.filter(c => failsOf(c, who)).length})`])]} />
      ${profiles.length > 1 && html`<${Choice} label="Part of the framework" optional=${false} value=${profile} onInput=${setProfile} options=${[['', 'All'], ...profiles.map(p => [p, p])]} />`}
    </div>
    ${shown.length === 0 ? html`<${Empty} title="No control has this result"><p>Choose another result above.</p><//>`
    : html`<p class="quiet" role="status">${count(shown.length, 'control')} shown. The titles are our own, not the text of the standard.</p>
      <div class="controls">${shown.map(c => html`<${Control} key=${(c.profile ?? '') + c.id} of=${c} />`)}</div>`}
  <//>`;
}

function Control({of: c}) {
  const about = html`<p class="quiet">${[c.profile, c.related.length > 0 && `Relates to ${c.related.join(', ')} of NIST SP 800-53`, c.result !== 'manual' && `weight ${number(c.weight)}`].filter(Boolean).join(' · ')}</p>`;
  return html`<details>
    <summary><span class="row between"><span><strong>${c.id}</strong> ${c.title}</span><${Result} of=${c.result} /></span></summary>
    ${about}
    ${c.probes.length === 0 ? html`<p>A person has to judge this: the service cannot see it.</p>` : html`<ul class="list">${c.probes.map(p => html`<${Probe} key=${p.name} of=${p} />`)}</ul>`}
  </details>`;
}

function Probe({of: p}) {
  return html`<li><div class="stack tight grow">
    <div class="row between"><strong>${p.title}</strong><${Result} of=${p.result} /></div>
    <p>${p.detail.charAt(0).toUpperCase() + p.detail.slice(1)}</p>
    ${p.result === 'fail' && html`<p><strong>${p.remedy}.</strong> <a href=${p.guide} target="_blank" rel="noopener noreferrer">How to do it<span class="unseen">: ${p.title}</span></a></p>
      <p class="quiet">A job of ${jobs[p.responsible][1]}; failing since <${Time} at=${p.since} /></p>`}
    <p class="quiet">${p.sample === 0 ? 'No items to check' : `${count(p.sample, 'item')} checked`}, ${p.window_days === 0 ? 'as of that entry' : `over the ${count(p.window_days, 'day')} before that entry`}. <code>${p.name}</code></p>
    ${p.evidence.length > 0 && html`<p>Evidence: ${p.evidence.map((e, i) => html`${i > 0 && ', '}<${Link} key=${e.sequence} to=${'/audit/' + e.sequence} title=${'Hash ' + e.hash}>entry ${number(e.sequence)}<//>`)}</p>`}
  </div></li>`;
}
