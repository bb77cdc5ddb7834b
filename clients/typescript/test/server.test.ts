// What the client does with a real server. typescript_test.go starts one and sets the environment.
import assert from 'node:assert/strict';
import {readFileSync} from 'node:fs';
import test from 'node:test';
import {parse} from 'yaml';
import {Client, LatticekeepError, type AuditEntry} from '@latticekeep/client';
import {Invalid, readSealingKey, sealManifest} from '@latticekeep/client/seal';
import {
  Refused, readPublicKey, verifyCheckpoint, verifyConsistency, verifyEntry, verifyHash, verifyInclusion, verifyLink, verifySignature, verifyTiles,
} from '@latticekeep/client/verify';

const env = (name: string): string => process.env[`LATTICEKEEP_${name}`] ?? '';
const url = env('URL');
const options = {skip: url === '' && 'LATTICEKEEP_URL is not set: go test ./clients/typescript starts a server and sets it'};

const connect = () => new Client(url || 'https://vault.example.org', {apiKey: env('API_KEY')});
const {v1, v2} = connect();
const login = {body: {email: env('EMAIL'), password: env('PASSWORD')}};

/** Has the test of Go move the clock, or the server do in the background what it does as time passes. */
async function control(what: 'advance' | 'follow'): Promise<void> {
  const response = await fetch(`${env('CONTROL')}/${what}`, {method: 'POST'});
  assert.ok(response.ok, `${what}: ${response.status}`);
}

const fails = (is: (e: LatticekeepError) => boolean) => (e: unknown) => e instanceof LatticekeepError && is(e);
const read = (stream: ReadableStream<Uint8Array>) => new Response(stream).arrayBuffer().then(b => new Uint8Array(b));

test('credentials are sealed, read, changed only as they were read, and deleted', options, async () => {
  const name = 'shop/prod/größe (1)';
  const sealed = await v2.sealCredential({body: {name, credential_type: 'database', values: {password: 'one'}, ttl_days: 30}});
  const path = {credential_id: sealed.credential_id};
  const {etag, body} = await v2.call('unsealCredential', {path});
  assert.deepEqual([body.values, body.version], [{password: 'one'}, 1]);
  assert.ok(etag);
  const replaced = await v2.replaceCredential({path, body: {values: {password: 'two'}}, ifMatch: etag});
  assert.equal(replaced.version, 2);
  await assert.rejects(v2.replaceCredential({path, body: {values: {password: 'three'}}, ifMatch: etag}), fails(e => e.isPreconditionFailed));
  const put = {path: {name}, body: {credential_type: 'database', values: {password: 'four'}}};
  await assert.rejects(v2.putCredentialByName({...put, ifNoneMatch: '*'}), fails(e => e.isPreconditionFailed));
  assert.equal((await v2.putCredentialByName(put)).version, 3);
  assert.equal((await v2.unsealCredentialByName({path: {name}})).values.password, 'four');
  await v2.deleteCredential({path});
  await assert.rejects(v2.unsealCredential({path}), fails(e => e.isForbidden && e.requestId !== '' && !e.message.includes(path.credential_id)));
});

test('a seal with the key of an earlier one answers the same credential', options, async () => {
  const seal = {body: {name: 'once', credential_type: 't', values: {k: 'v'}}, idempotencyKey: 'order-1'};
  assert.equal((await v2.sealCredential(seal)).credential_id, (await v2.sealCredential(seal)).credential_id);
});

test('lists are read page by page', options, async () => {
  for (const name of ['paged/a', 'paged/b', 'paged/c']) await v2.sealCredential({body: {name, credential_type: 't', values: {k: 'v'}}});
  const names = [];
  for await (const page of v2.paginate('listCredentials', {query: {prefix: 'paged/', limit: 1}})) names.push(...page.credentials.map(c => c.name));
  assert.deepEqual(names.sort(), ['paged/a', 'paged/b', 'paged/c']);
});

test('data is encrypted and signed in both versions', options, async () => {
  const encrypted = await v2.encryptData({body: {data: 'größer'}});
  assert.equal((await v2.decryptData({body: encrypted})).data, 'größer');
  const signed = await v2.signData({body: {data: 'x'}});
  assert.ok((await v2.verifyData({body: {...signed, data: 'x'}})).valid);
  const key = await v1.generateKey({body: {algorithm: 'ML-KEM-768', name: 'orders', rotation_period: 30}});
  const {encrypted_data} = await v1.encryptData({body: {algorithm: 'ML-KEM-768', data: 'hello', key_id: key.key_id}});
  assert.equal((await v1.decryptData({body: {encrypted_data, key_id: key.key_id}})).data, 'hello');
});

test('text and bytes come as they are', options, async () => {
  assert.match(await v2.getContract(), /^openapi: 3/);
  assert.match(new TextDecoder().decode(await read(await v2.getInventory())), /"CycloneDX"/);
  assert.equal((await v2.getHealth()).status, 'ok');
});

test('a report is downloaded from its signed URL', options, async () => {
  await control('follow');
  const made = await v2.getComplianceReport({query: {framework: 'hipaa', format: 'oscal'}});
  const report = JSON.parse(new TextDecoder().decode(await read(await v2.downloadReport(made.url))));
  assert.ok(report['assessment-results'], Object.keys(report).join());
  await assert.rejects(v2.downloadReport(`${made.url}a`), fails(e => e.isForbidden));
});

test('an export and a backup are streams', options, async () => {
  const operator = new Client(url, {apiKey: env('SYSTEM_KEY')});
  const lines = new TextDecoder().decode(await read(await operator.v2.exportAuditLog())).trim().split('\n').map(line => JSON.parse(line));
  assert.ok(lines.length > 1);
  const key = await v2.getAuditPublicKey();
  for (const entry of lines.filter(line => 'event_type' in line).slice(-5)) verifyEntry(entry, key);
  const backup = await read(await operator.v2.takeBackup({body: {recipient: env('RECIPIENT')}}));
  assert.match(new TextDecoder('latin1').decode(backup.subarray(0, 200)), /age-encryption/);
});

test('a session is renewed once for all calls in flight', options, async () => {
  const client = new Client(url);
  await assert.rejects(client.v2.getAccount(), fails(e => e.isUnauthenticated));
  await client.v2.login(login);
  await control('advance'); // beyond the life of an access token
  // A second use of the refresh token would end the session.
  for (const me of await Promise.all(Array.from({length: 5}, () => client.v2.getAccount()))) assert.equal(me.user?.email, login.body.email);
  await client.v2.refreshSession();
  assert.ok((await client.v2.listSessions()).sessions.some(session => session.current));
  await client.v2.logout();
  await assert.rejects(client.v2.getAccount(), fails(e => e.isUnauthenticated));
});

test('the tail yields the entries behind the last one that was read', options, async () => {
  const {entries: [newest]} = await v2.queryAuditLog({query: {limit: 1}});
  assert.ok(newest);
  const {credential_id} = await v2.sealCredential({body: {name: 'tailed', credential_type: 't', values: {k: 'v'}}});
  const entries: AuditEntry[] = [];
  for await (const entry of v2.tailAuditLog({lastEventId: newest.sequence, query: {wait: 0}})) entries.push(entry);
  assert.ok(entries.every(e => e.sequence > newest.sequence));
  assert.ok(entries.some(e => e.resource.id === credential_id));
});

test('an entry comes while the tail is open', options, async () => {
  // The other address checks each answer as a whole, so that none can be read as it arrives.
  const direct = new Client(env('DIRECT_URL'), {apiKey: env('API_KEY')});
  for await (const entry of direct.v2.tailAuditLog()) {
    if (entry.event_type === 'CREDENTIAL_SEALED') break;
    await v2.sealCredential({body: {name: 'live', credential_type: 't', values: {k: 'v'}}});
  }
});

// ---- verification

test('entries of the server verify, and altered ones are refused', options, async () => {
  const {entries} = await v2.queryAuditLog({query: {limit: 20}});
  const key = await v2.getAuditPublicKey();
  assert.equal(readPublicKey(key).fingerprint, key.fingerprint);
  for (const [i, entry] of entries.entries()) {
    assert.equal(verifyEntry(entry, key).hash, entry.hash);
    const previous = entries[i + 1];
    if (previous) assert.ok(verifyLink(entry, previous).tenant);
  }
  const [entry] = entries;
  assert.ok(entry);
  const refused = (part: string) => (e: unknown) => e instanceof Refused && e.part === part;
  for (const name of Object.keys(entry) as (keyof AuditEntry)[]) {
    const altered = {...entry, [name]: alter(entry[name])};
    if (name === 'signature') assert.throws(() => verifySignature(altered, key), refused('signature'));
    else assert.throws(() => verifyHash(altered), refused('hash'), name);
  }
  assert.throws(() => verifyHash({...entry, more: ''} as AuditEntry), refused('form'));
  const other = {...key, key: {...key.key, pub: key.key.pub.replace(/^./, c => c === 'A' ? 'B' : 'A')}};
  assert.throws(() => verifyEntry(entry, other), refused('key'));
});

/** Another value of the same kind. */
function alter(value: unknown): unknown {
  if (typeof value === 'number') return value + 1;
  if (typeof value === 'string') return value.startsWith('0') ? value.replace('0', '1') : `0${value.slice(1)}`;
  return {...value as object, id: 'other'};
}

test('checkpoints, proofs and tiles of the server verify', options, async () => {
  await control('follow');
  const publicKeys = await v2.getAuditPublicKey();
  const from = await v2.getCheckpoint();
  await v2.sealCredential({body: {name: 'one more', credential_type: 't', values: {k: 'v'}}});
  await control('follow');
  const checkpoint = await v2.getCheckpoint();
  const {size, sequence, fingerprint} = verifyCheckpoint(checkpoint, publicKeys);
  assert.equal(fingerprint, env('LOG'));
  assert.throws(() => verifyCheckpoint(checkpoint.checkpoint.replace(`\n${size}\n`, `\n${size + 1}\n`), publicKeys), Refused);

  const {entries} = await v2.queryAuditLog({query: {limit: 20}});
  const entry = entries.find(e => e.sequence <= sequence);
  assert.ok(entry);
  const proof = await v2.proveInclusion({query: {sequence: entry.sequence, tree_size: size}});
  assert.equal(verifyInclusion({entry, proof, checkpoint, publicKeys}).index, entry.sequence - 1);
  assert.throws(() => verifyInclusion({entry, proof: {...proof, path: proof.path.toReversed()}, checkpoint, publicKeys}), Refused);

  const grown = await v2.proveConsistency({query: {from: from.tree_size, to: size}});
  assert.equal(verifyConsistency({from: from.checkpoint, to: checkpoint, proof: grown, publicKeys}).newer.size, size);
  const tile = async (level: number, index: number, width: number) => read(await v2.getTile({path: {level: `${level}` as '0', index}, query: {width}}));
  assert.ok(await verifyTiles({checkpoint, publicKeys, tile}) > 0);
});

// ---- sealing

test('what is sealed here opens on the server, and only as what it was sealed for', options, async () => {
  const document = await v2.getSealingKey();
  await assert.rejects(readSealingKey(document, '0'.repeat(64)), /identity/);
  const key = await readSealingKey(document, env('IDENTITY').toUpperCase().replace(/..(?=.)/g, '$&:'));
  const given = {key, namespace: 'shop', name: 'db', credentialType: 'database', now: new Date(key.createdAt)};
  const manifest = parse(sealManifest({...given, values: {password: 'tr0ub4dor', bytes: Uint8Array.of(0, 255)}}));
  assert.equal(manifest.kind, 'SealedCredential');
  // The manifest has the names of Kubernetes, the interface its own.
  const {suite, version, scope, keyID: key_id, values} = manifest.spec.sealed;
  const check = (name: string) => v2.checkManifest({body: {namespace: 'shop', name, credential_type: 'database', sealed: {
    suite, version, scope, key_id,
    values: Object.fromEntries(Object.entries<{data: string; sealedAt: string}>(values).map(([k, v]) => [k, {data: v.data, sealed_at: v.sealedAt}])),
  }}});
  assert.deepEqual(await check('db'), {success: true, accepted: true});
  assert.equal((await check('other')).code, 'does_not_open');
  assert.throws(() => sealManifest({...given, values: {}}), Invalid);
  assert.throws(() => sealManifest({...given, key: {...key}, values: {k: 'v'}}), /not verified/);
});

// ---- all operations

test('every operation reaches its place on the server', options, async () => {
  for (const version of ['v1', 'v2'] as const) {
    const contract = parse(readFileSync(new URL(`../../../api/openapi/${version}.yaml`, import.meta.url), 'utf8'), {maxAliasCount: -1});
    for (const item of Object.values<Record<string, {operationId?: string; requestBody?: object}>>(contract.paths)) {
      for (const {operationId, requestBody} of Object.values(item)) {
        if (!operationId) continue;
        const client = connect();
        if (operationId === 'logout' || operationId === 'refreshSession') await client.v2.login(login);
        const input = operationId === 'downloadReport' ? `${url}/api/v2/compliance/download`
          : {path: new Proxy({}, {get: () => '1'}), query: operationId === 'tailAuditLog' ? {wait: 0} : {}, ...(requestBody && {body: {}})};
        const called = (client[version] as unknown as Record<string, (input: unknown) => Promise<unknown> & AsyncIterable<unknown>>)[operationId]?.(input);
        try {
          if (operationId === 'tailAuditLog') for await (const _ of called ?? []);
          else await called;
        } catch (error) {
          // With nothing that makes sense most are refused.
          assert.ok(error instanceof LatticekeepError && error.status >= 400 && error.status !== 405, `${operationId}: ${error}`);
        }
      }
    }
  }
});
