// What to fix: the probes that fail, each once however many controls it fails, with whose job it is, how to do it,
// and the things by name.
import {html} from '../vendor/preact.js';
import {useAccount} from './account.js';
import {count} from './format.js';
import {useNames} from './names.js';
import {frameworks} from './words.js';
import {Link, Name, Panel, Time} from './ui.js';

// Whose job it is to fix what a probe found.
export const jobs = {tenant: ['Your organisation', 'your organisation'], deployment: ['The operator of this service', 'the operator of this service']};

// failuresOf returns the failing probes with the controls that each fails: [{probe, affects, controls}], affects being
// pairs of framework and controls. scores has the controls of each framework, with the names of their probes.
export function failuresOf(scores, probes) {
  return probes.filter(p => p.result === 'fail').map(probe => {
    const affects = scores.map(s => [s.framework, s.controls.filter(c => c.probes.includes(probe.name))]).filter(([, controls]) => controls.length > 0);
    return {probe, affects, controls: affects.reduce((n, [, controls]) => n + controls.length, 0)};
  }).sort((a, b) => b.controls - a.controls);
}

// failsFor reports whether a control fails for a reason that is the job of who. failing has the failing probes by name.
export const failsFor = (control, who, failing) => control.result === 'fail' && control.probes.some(name => failing.get(name)?.responsible === who);

// Where things are fixed, and the scope that the page needs.
const places = {
  credential: ['vault:read', id => '/vault/' + id], key: ['keys:read', id => '/keys/' + id],
  api_key: ['account:admin', () => '/settings/api-keys'], user: ['account:admin', () => '/settings/members'],
};

// kindOf tells from an id and the probe what a thing is of which the name is not known.
function kindOf(id, probe) {
  if (id.startsWith('cred_')) return 'credential';
  if (id.startsWith('usr_')) return 'user';
  return probe.name.startsWith('key') ? 'key' : 'api_key';
}

function Thing({id, probe, called}) {
  const account = useAccount();
  const kind = called?.type ?? kindOf(id, probe);
  const text = called ? html`<${Name}>${called.name}<//>` : html`<code>${id}</code>`;
  const [scope, to] = places[kind] ?? [];
  if (called?.gone) return html`<span title=${id}>${text} <span class="quiet">(deleted)</span></span>`;
  return scope && account.can(scope) ? html`<${Link} to=${to(encodeURIComponent(id))} title=${id}>${text}<//>` : html`<span title=${id}>${text}</span>`;
}

const most = 20; // things that the interface names of one probe

function Failure({of: {probe: p, affects, controls}, known}) {
  const one = affects.length === 1;
  return html`<li><article class="stack tight grow" aria-label=${p.title}>
    <div class="row between"><h3>${p.title}</h3><span class="quiet">began to fail <${Time} at=${p.since} relative /></span></div>
    <p>${p.detail.charAt(0).toUpperCase() + p.detail.slice(1)}.</p>
    <p><strong>${p.remedy}.</strong> <a href=${p.guide} target="_blank" rel="noopener noreferrer">How to do it<span class="unseen">: ${p.title}</span></a></p>
    ${p.objects && html`<p class="things"><span class="quiet">For</span> ${p.objects.map(id => html`<${Thing} key=${id} id=${id} probe=${p} called=${known.get(id)} />`)}
      ${p.objects.length === most && html`<span class="quiet">and perhaps more</span>`}</p>`}
    <details><summary>${one ? `Fails ${count(controls, 'control')}` : `Fails ${count(controls, 'control')} of ${count(affects.length, 'framework')}`}</summary>
      <ul class="affects">${affects.map(([framework, list]) => html`<li key=${framework}>${!one && html`<${Link} to=${`/compliance/${framework}?result=fail`}>${frameworks[framework]}<//>: `}
        ${list.map(c => html`<span key=${(c.profile ?? '') + c.id} title=${c.title}>${c.id}</span>`)}</li>`)}</ul></details>
  </article></li>`;
}

const group = {
  tenant: ['What your organisation has to fix', 'Nothing fails that is the job of your organisation.'],
  deployment: ['What the operator of this service has to fix', 'Nothing fails that is the job of the operator of this service.'],
};

// Failures shows those of failuresOf in two groups: those of the viewer's own organisation, and those of the operator.
export function Failures({failures}) {
  const known = useNames(failures.flatMap(f => f.probe.objects ?? []));
  return Object.keys(jobs).map(who => {
    const own = failures.filter(f => f.probe.responsible === who), [title, none] = group[who];
    return html`<${Panel} key=${who} title=${own.length === 0 ? title : `${title} (${own.length})`}>
      ${own.length === 0 ? html`<p class="quiet">${none}</p>` : html`
        ${who === 'deployment' && html`<p class="quiet">The operator of the service has to do this. Your organisation cannot: ask the operator, and show this list.</p>`}
        <ul class="list failures">${own.map(f => html`<${Failure} key=${f.probe.name} of=${f} known=${known} />`)}</ul>`}
    <//>`;
  });
}
