// Policies, who has which, and what somebody may do by them.
import {html, useEffect, useRef, useState} from '../../vendor/preact.js';
import {unverified, useAccount} from '../../lib/account.js';
import {del, post, put} from '../../lib/api.js';
import {visible} from '../../lib/format.js';
import {Narrowed} from '../../lib/list.js';
import {Losses} from '../../lib/losses.js';
import {ChooseSubject, Subject, idOf, loadAccess, nobody, said} from '../../lib/subjects.js';
import {Address, Choice, Confirm, Dialog, Empty, Facts, Form, Input, Loaded, Name, Panel, Table, Tag, Time, say, useAsked, useLoad} from '../../lib/ui.js';

const verbs = ['list', 'read', 'write', 'delete'];
const at = id => '/api/v2/access/policies/' + encodeURIComponent(id);
const bindingOf = id => '/api/v2/access/bindings/' + encodeURIComponent(id);

const Rules = ({of}) => of.length === 0 ? html`<span class="quiet">allows nothing</span>`
  : html`<ul class="plain">${of.map((rule, i) => html`<li key=${i}><code><${Name}>${rule.path}<//></code> <span class="quiet">${rule.verbs.join(', ')}</span></li>`)}</ul>`;

export function Policies() {
  const account = useAccount();
  const access = useLoad(loadAccess, []);
  const [open, setOpen] = useAsked({create: account.writes && {change: {name: '', rules: []}}, bind: account.writes && {bind: null}}); // {change, remove, bind or unbind}
  const close = () => setOpen(null);
  const done = message => {
    close();
    say(message);
    access.reload();
  };
  return html`<${Loaded} of=${access} lines=${6}>${a => {
    const holders = policy => a.bindings.filter(b => b.policies.includes(policy.policy_id)).map(b => a.of(b.subject));
    return html`
    <${Panel} title="Policies" actions=${html`<button type="button" class="primary" disabled=${!account.writes} onClick=${() => setOpen({change: {name: '', rules: []}})}>Create a policy</button>`}>
      <p class="quiet">A policy limits users, API keys and ServiceAccounts to some paths. The name of a credential is its path. Whoever has no policy reaches all paths, as far as their scopes allow.</p>
      ${a.policies.length === 0 ? html`<${Empty} title="No policies yet"><p>Create one, and bind it to those who are to reach some paths only.</p><//>`
      : html`<${Narrowed} rows=${a.policies} label="Find a policy" textOf=${p => [p.name, ...p.rules.map(r => r.path)].join('\n')}>${rows => html`
        <${Table} caption="List of policies" rowKey="policy_id" rows=${rows} columns=${[
          {title: 'Name', cell: p => html`<${Name}>${p.name}<//>`},
          {title: 'Allows', cell: p => html`<${Rules} of=${p.rules} />`},
          {title: 'Bound to', cell: p => html`<${Few} of=${holders(p)} />`},
          {title: 'Changed', class: 'once', cell: p => html`<${Time} at=${p.changed_at} relative />`},
          {title: 'Actions', hidden: true, class: 'fit', cell: p => html`<span class="actions">
            <button type="button" disabled=${!account.writes} aria-label=${'Change ' + visible(p.name)} onClick=${() => setOpen({change: p})}>Change</button>
            <button type="button" class="danger" aria-label=${'Delete ' + visible(p.name)} onClick=${() => setOpen({remove: p, holders: holders(p)})}>Delete</button></span>`},
        ]} />`}<//>`}
    <//>
    <${Panel} title="Bindings" actions=${html`<button type="button" class="primary" disabled=${!account.writes || a.policies.length === 0} onClick=${() => setOpen({bind: null})}>Bind policies</button>`}>
      ${a.bindings.length === 0 ? html`<p class="quiet">Nobody has a policy. Nothing limits anybody but the scopes of their role or key.</p>`
      : html`<${Narrowed} rows=${a.bindings} label="Find a binding" textOf=${b => [a.of(b.subject).name ?? b.subject, ...b.policies.map(a.policyName)].join('\n')}>${rows => html`
        <${Table} caption="List of bindings" rowKey="subject" rows=${rows} columns=${[
          {title: 'Who', cell: b => html`<${Subject} of=${a.of(b.subject)} />`},
          {title: 'Policies', cell: b => b.policies.length === 0 ? html`<${Tag} kind="warn">none: no path is allowed<//>` : html`<ul class="plain">${b.policies.map(id => html`<li key=${id}><${Name}>${a.policyName(id)}<//></li>`)}</ul>`},
          {title: 'Bound', cell: b => html`<${Time} at=${b.bound_at} relative /> <span class="quiet">by ${b.bound_by ? html`<${Address}>${said(a.of(b.bound_by))}<//>` : 'the service'}</span>`},
          {title: 'Actions', hidden: true, class: 'fit', cell: b => html`<span class="actions">
            <button type="button" disabled=${!account.writes} aria-label=${'Change the policies of ' + said(a.of(b.subject))} onClick=${() => setOpen({bind: b})}>Change</button>
            <button type="button" class="danger" aria-label=${'Unbind ' + said(a.of(b.subject))} onClick=${() => setOpen({unbind: a.of(b.subject)})}>Unbind</button></span>`},
        ]} />`}<//>`}
    <//>
    <${Tester} access=${a} />
    ${open?.change && html`<${EditPolicy} of=${open.change} access=${a} onClose=${close} onDone=${done} />`}
    ${open?.remove && (open.holders.length > 0 ? html`<${Dialog} title="This policy is bound" onClose=${close}>
        <p><${Name}>${open.remove.name}<//> cannot be deleted as long as somebody has it: <${Few} of=${open.holders} />. Give them other policies first.</p><//>`
      : html`<${Confirm} title="Delete this policy?" action="Delete" onClose=${close} onConfirm=${async () => {
          await del(at(open.remove.policy_id));
          done('The policy is deleted');
        }}><p>Nobody has <${Name}>${open.remove.name}<//>. This cannot be undone.</p><//>`)}
    ${open?.bind !== undefined && a.policies.length > 0 && html`<${Bind} of=${open.bind} access=${a} onClose=${close} onDone=${done} />`}
    ${open?.unbind && html`<${Unbind} of=${open.unbind} access=${a} onClose=${close} onDone=${done} />`}`;
  }}<//>`;
}

// Few names some subjects, and says how many more there are.
const Few = ({of}) => of.length === 0 ? html`<span class="quiet">nobody</span>`
  : html`<ul class="plain">${of.slice(0, 5).map(s => html`<li key=${s.id}><${Subject} of=${s} /></li>`)}${of.length > 5 && html`<li class="quiet">and ${of.length - 5} more</li>`}</ul>`;

// ---- changes

let made = 0;
const newRule = (path = '', chosen = ['list', 'read']) => ({id: 'rule' + ++made, path, verbs: chosen});

function EditPolicy({of, access, onClose, onDone}) {
  const account = useAccount();
  const isNew = !of.policy_id;
  const [name, setName] = useState(of.name);
  const [rules, setRules] = useState(() => isNew ? [newRule()] : of.rules.map(r => newRule(r.path, r.verbs)));
  const [wrong, setWrong] = useState({});
  const asked = rules.map(({path, verbs}) => ({path, verbs}));
  const complete = asked.every(r => r.path !== '' && r.verbs.length > 0);
  const save = async () => {
    const without = Object.fromEntries(rules.filter(r => r.verbs.length === 0).map(r => [r.id, 'Choose at least one verb, or remove this rule.']));
    setWrong(without);
    if (Object.keys(without).length > 0) return;
    await (isNew ? post('/api/v2/access/policies', {name, rules: asked}) : put(at(of.policy_id), {name, rules: asked}));
    onDone(isNew ? 'The policy is created' : 'The policy is changed');
  };
  return html`<${Dialog} title=${isNew ? 'Create a policy' : 'Change a policy'} onClose=${onClose}>
    <${Form} onSubmit=${save} submit=${isNew ? 'Create' : 'Change'} cancel=${onClose} texts=${unverified(account)}>
      <${Input} label="Name" maxlength="255" value=${name} onInput=${setName} autofocus />
      <${EditRules} rules=${rules} onChange=${r => { setRules(r); setWrong({}); }} wrong=${wrong} />
      ${!isNew && html`<${Losses} access=${access} change=${complete ? {change: 'change_policy', policy_id: of.policy_id, rules: asked} : null} />`}
    <//>
  <//>`;
}

function EditRules({rules, onChange, wrong}) {
  const box = useRef(), focus = useRef(null);
  useEffect(() => { // after a rule has come or gone, the focus is where one goes on
    if (focus.current === null) return;
    const there = box.current.querySelector(focus.current); // not yet, if this is the effect of what was drawn before
    if (!there) return;
    there.focus();
    focus.current = null;
  });
  const change = (id, fields) => onChange(rules.map(r => r.id === id ? {...r, ...fields} : r));
  const add = () => {
    const rule = newRule();
    focus.current = `[data-rule=${rule.id}] input`;
    onChange([...rules, rule]);
  };
  const remove = rule => {
    const near = rules[rules.indexOf(rule) + 1] ?? rules[rules.indexOf(rule) - 1];
    focus.current = near ? `[data-rule=${near.id}] input` : '[data-add]';
    onChange(rules.filter(r => r !== rule));
  };
  const toggle = (rule, verb) => change(rule.id, {verbs: verbs.filter(v => rule.verbs.includes(v) !== (v === verb))});
  return html`<div class="stack tight" ref=${box}>
    <p class="hint"><code>shop/prod/db</code> is one path, <code>shop/*/db</code> has any segment in the place of <code>*</code>, and <code>shop/**</code> is all below <code>shop/</code>. No verb includes another.</p>
    ${rules.map((rule, i) => html`<div class="rule" key=${rule.id} data-rule=${rule.id} role="group" aria-label=${`Rule ${i + 1}`}>
      <${Input} label="Path" class="mono" autocapitalize="none" maxlength="255" placeholder="shop/prod/**" value=${rule.path} onInput=${path => change(rule.id, {path})} />
      <fieldset aria-describedby=${wrong[rule.id] ? rule.id + '-wrong' : undefined}><legend>Verbs</legend><div class="row">${verbs.map(verb => html`
        <div class="check" key=${verb}><input type="checkbox" id=${rule.id + verb} checked=${rule.verbs.includes(verb)} onChange=${() => toggle(rule, verb)} /><label for=${rule.id + verb}>${verb}</label></div>`)}</div></fieldset>
      <button type="button" aria-label=${`Remove rule ${i + 1}`} onClick=${() => remove(rule)}>Remove</button>
      ${wrong[rule.id] && html`<p class="wrong" id=${rule.id + '-wrong'} role="alert">${wrong[rule.id]}</p>`}
    </div>`)}
    ${rules.length === 0 && html`<p class="quiet">Without a rule the policy allows nothing.</p>`}
    <div class="actions"><button type="button" data-add disabled=${rules.length >= 50} onClick=${add}>Add a rule</button></div>
  </div>`;
}

const mostPolicies = 8;

function Bind({of, access, onClose, onDone}) {
  const account = useAccount();
  const [who, setWho] = useState(nobody);
  const [chosen, setChosen] = useState(of?.policies ?? []);
  const subject = of ? of.subject : idOf(who);
  const bound = !of && access.bindings.find(b => b.subject === subject);
  const toggle = id => setChosen(chosen.includes(id) ? chosen.filter(c => c !== id) : [...chosen, id]);
  const bind = async () => {
    await put(bindingOf(subject), {policies: chosen});
    onDone('The policies are bound');
  };
  return html`<${Dialog} title=${of ? 'Change a binding' : 'Bind policies'} onClose=${onClose}>
    <${Form} onSubmit=${bind} submit="Bind" cancel=${onClose} texts=${unverified(account)}>
      ${of ? html`<p><${Subject} of=${access.of(of.subject)} /></p>` : html`<${ChooseSubject} access=${access} value=${who} onInput=${setWho} autofocus />`}
      ${bound && html`<p class="notice">The policies chosen here replace those that it has: ${bound.policies.map(access.policyName).map(visible).join(', ') || 'none'}.</p>`}
      <fieldset><legend>Policies</legend>
        <${Narrowed} rows=${access.policies} label="Find a policy to bind" textOf=${p => p.name}>${rows => rows.map(p => html`
          <div class="check" key=${p.policy_id}><input type="checkbox" id=${'bind-' + p.policy_id} checked=${chosen.includes(p.policy_id)} disabled=${!chosen.includes(p.policy_id) && chosen.length >= mostPolicies} onChange=${() => toggle(p.policy_id)} />
            <label for=${'bind-' + p.policy_id}><${Name}>${p.name}<//></label></div>`)}<//>
      </fieldset>
      <p class="hint">${who.kind === 'group' && !of || access.of(subject).kind === 'group' ? 'The members of the group may also do what any of these policies allows. A member without a binding of their own is not limited by it.'
        : chosen.length === 0 ? 'Without any policy nothing is allowed on any path.' : 'From the next request on, what any of these policies allows is allowed, and nothing else.'}</p>
      <${Losses} access=${access} change=${subject ? {change: 'bind_policies', subject, policies: chosen} : null} />
    <//>
  <//>`;
}

function Unbind({of, access, onClose, onDone}) {
  return html`<${Confirm} title="Take the policies away?" action="Unbind" onClose=${onClose} onConfirm=${async () => {
    await del(bindingOf(of.id));
    onDone('The binding is gone');
  }}>
    <p>${of.kind === 'group' ? html`The group <${Name}>${said(of)}<//> adds nothing any more to what its members may do.`
      : html`From the next request on, <${Subject} of=${of} /> may do on <strong>all paths</strong> what its scopes allow.`}</p>
    ${of.kind === 'group' && html`<${Losses} access=${access} change=${{change: 'unbind_policies', subject: of.id}} />`}
  <//>`;
}

// ---- the tester

const reasons = {
  missing_scope: 'The role or the key lacks the scope that this takes. No policy adds one.',
  trial_ended: 'The trial of the organisation has ended, so that nothing is changed any more.',
  outside_policy: 'No policy that is bound allows this verb on this path.',
};

function Tester({access}) {
  const [who, setWho] = useState(nobody);
  const [verb, setVerb] = useState('read');
  const [path, setPath] = useState('');
  const [found, setFound] = useState(null);
  const subject = idOf(who), wanted = JSON.stringify([subject, verb, path]);
  const check = async () => setFound({...await post('/api/v2/access/check', {subject, verb, path}), wanted});
  const shown = found?.wanted === wanted ? found : null;
  return html`<${Panel} title="Test access">
    <p class="quiet">Asks the rules alone, and never looks whether a credential is there.</p>
    <${Form} onSubmit=${check} submit="Check" texts=${{404: 'There is nobody of this name any more. Load the page again.'}}>
      <${ChooseSubject} access=${access} value=${who} onInput=${setWho} owners label="Who is it" kinds=${['user', 'API key', 'ServiceAccount']} />
      <div class="pairs"><${Choice} label="Verb" value=${verb} onInput=${setVerb} options=${verbs.map(v => [v, v])} />
        <${Input} label="On the path" class="mono" autocapitalize="none" maxlength="255" placeholder="shop/prod/db" value=${path} onInput=${setPath} /></div>
    <//>
    <div role="status">${shown && html`<${Facts} of=${[
      ['Answer', shown.allowed ? html`<${Tag} kind="good">allowed<//>` : html`<${Tag} kind="bad">not allowed<//>`],
      ['Why', shown.allowed ? shown.groups?.length > 0 ? html`By the policies of ${shown.groups.length === 1 ? 'the group' : 'the groups'} ${shown.groups.map((g, i) => html`${i > 0 && ', '}<${Name}>${said(access.of(g))}<//>`)}.`
          : access.bindings.some(b => b.subject === subject) ? 'A policy that is bound allows it.' : who.kind === 'API key' ? 'Its scopes allow it, and no policy of the key or of whoever answers for it forbids it.' : 'No policy limits it, and its scopes allow it.'
        : reasons[shown.reason] ?? shown.reason],
      ['What was judged', who.kind === 'ServiceAccount' && 'The policies only. The cluster decides on each request which scopes a ServiceAccount has.'],
    ]} />`}</div>
  <//>`;
}
