#!/usr/bin/env python3
"""Verify an export of a latticekeep audit log, with Python's standard library.

A second implementation, written from docs/audit.md and docs/formats.md. It checks
all that SHA-2 and SHA-3 can show: the canonical form of every entry, its hash, the
links of the log and of each tenant, the places where sequences may jump, the paths of
entries that were signed in groups, and the tree of the closing checkpoint. It does
not check ML-DSA-65 signatures, which the standard library does not have: that
somebody with another key wrote all of it shows only against a fingerprint and by
"latticekeep audit verify".

Exit status: 0 when all holds, 1 when it does not, with the first bad sequence,
2 when it could not be read.
"""

import argparse
import base64
import binascii
import datetime
import hashlib
import json
import re
import sys

MAX_INTEGER = 2**53 - 1
ZERO_HASH = "0" * 64
SIGNATURE_SIZE = 3309
PUBLIC_KEY_SIZE = 1952
KEY_TYPE = b"\xfflatticekeep.dev/ml-dsa-65/checkpoint/v1"
ORIGIN = "latticekeep.dev/log/"
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", re.ASCII)

# The members of an entry, and what they are.
STRING, NUMBER, REFERENCE, STRINGS = range(4)
MEMBERS = {
    "actor": REFERENCE, "attributes": STRINGS, "event_type": STRING, "hash": STRING, "key_id": STRING, "outcome": STRING,
    "previous_hash": STRING, "request_id": STRING, "resource": REFERENCE, "salt": STRING, "sequence": NUMBER,
    "signature": STRING, "source_ip": STRING, "tenant_id": STRING, "tenant_previous_hash": STRING,
    "tenant_sequence": NUMBER, "timestamp": STRING,
}


class Broken(Exception):
    """The log does not hold, from a sequence on."""

    def __init__(self, sequence, reason):
        super().__init__("the chain is broken at sequence %d: %s" % (sequence, reason))
        self.sequence = sequence


class Unusable(Exception):
    """What was given is not what it must be; it says nothing about the log."""


def frame(label, *fields):
    out = b""
    for part in (label.encode(),) + fields:
        out += len(part).to_bytes(4, "big") + part
    return out


def canonical(value):
    """RFC 8785 of what an entry has in it: objects, strings and integers."""
    if isinstance(value, dict):
        members = sorted(value.items(), key=lambda m: m[0].encode())
        return "{" + ",".join(canonical(k) + ":" + canonical(v) for k, v in members) + "}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def strict_base64(text):
    """Decode the one standard spelling, or return None."""
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error, ValueError):
        return None
    return data if base64.b64encode(data).decode() == text else None


def is_strings(value):
    return isinstance(value, dict) and all(isinstance(v, str) for v in value.values())


def parse_entry(line):
    """Return the entry of a line of bytes, or None when it is not in canonical form."""
    try:
        entry = json.loads(line.decode("utf-8"))
        if not isinstance(entry, dict) or set(entry) != set(MEMBERS):
            return None
        for name, kind in MEMBERS.items():
            value = entry[name]
            if kind == STRING and not isinstance(value, str):
                return None
            if kind == NUMBER and (type(value) is not int or not 0 <= value <= MAX_INTEGER):
                return None
            if kind in (REFERENCE, STRINGS) and not is_strings(value):
                return None
            if kind == REFERENCE and set(value) != {"id", "type"}:
                return None
        return entry if canonical(entry).encode("utf-8") == line else None
    except (ValueError, RecursionError):  # Unicode and JSON errors are ValueErrors
        return None


def entry_hash(entry):
    core = {name: value for name, value in entry.items() if name not in ("hash", "signature")}
    return hashlib.sha3_256(canonical(core).encode("utf-8")).digest()


def is_time(text):
    if not TIME.fullmatch(text):
        return False
    try:
        return datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ") > datetime.datetime.min
    except ValueError:
        return False


def decimal(text):
    """Read a number in its only spelling, or return None."""
    if not isinstance(text, str) or not re.fullmatch("0|[1-9][0-9]*", text, re.ASCII) or int(text) > MAX_INTEGER:
        return None
    return int(text)


# The tree of RFC 6962.

def leaf_hash(data):
    return hashlib.sha256(b"\x00" + data).digest()


def node_hash(left, right):
    return hashlib.sha256(b"\x01" + left + right).digest()


class Tree:
    """The right edge of a growing tree: the roots of its perfect subtrees, the largest first."""

    def __init__(self):
        self.size = 0
        self.subtrees = []

    def add(self, data):
        node, size = leaf_hash(data), self.size
        while size & 1:
            node, size = node_hash(self.subtrees.pop(), node), size >> 1
        self.subtrees.append(node)
        self.size += 1

    def root(self):
        if not self.subtrees:
            return hashlib.sha256(b"").digest()
        node = self.subtrees[-1]
        for left in reversed(self.subtrees[:-1]):
            node = node_hash(left, node)
        return node


def path_length(n, index):
    """How many hashes lead from a leaf to the root of a tree of n leaves."""
    inner = (index ^ (n - 1)).bit_length()
    return inner + bin(index >> inner).count("1")


def path_root(data, n, index, path):
    node, inner = leaf_hash(data), (index ^ (n - 1)).bit_length()
    for i, sibling in enumerate(path):
        if i < inner and not index >> i & 1:
            node = node_hash(node, sibling)
        else:
            node = node_hash(sibling, node)
    return node


def parse_signature(text):
    """Return (n, index, path) of a signature, n being 0 for a plain one, or None when it is malformed."""
    data = strict_base64(text)
    if data is None:
        return None
    if len(data) == SIGNATURE_SIZE:
        return 0, 0, []
    if len(data) < 9 + SIGNATURE_SIZE or data[0] != 2:
        return None
    n, index = int.from_bytes(data[1:5], "big"), int.from_bytes(data[5:9], "big")
    path = data[9:-SIGNATURE_SIZE]
    if n < 2 or index >= n or len(path) != 32 * path_length(n, index):
        return None
    return n, index, [path[i:i + 32] for i in range(0, len(path), 32)]


# Checkpoints: signed notes.

class Checkpoint:
    """The text of a checkpoint, in its only spelling."""

    FORM = re.compile(
        re.escape(ORIGIN) + r"([^\n/]*)/([1-9][0-9]*)\n([1-9][0-9]*)\n([A-Za-z0-9+/=]{44})\n"
        r"sequence ([1-9][0-9]*)\nhash ([0-9a-f]{64})\ntime ([^\n]*)\n", re.ASCII)

    def __init__(self, text):
        m = self.FORM.fullmatch(text)
        if not m or strict_base64(m[4]) is None or not is_time(m[7]):
            raise ValueError("it is not a checkpoint of a latticekeep log")
        self.chain_id, self.epoch, self.size = m[1], int(m[2]), int(m[3])
        self.root, self.sequence, self.hash, self.time = strict_base64(m[4]), int(m[5]), m[6], m[7]
        if len(self.root) != 32 or self.sequence < self.size or self.sequence > MAX_INTEGER:
            raise ValueError("it is not a checkpoint of a latticekeep log")

    def origin(self):
        return "%s%s/%d" % (ORIGIN, self.chain_id, self.epoch)

    def head(self):
        return self.chain_id, self.epoch, self.size, self.root, self.sequence, self.hash


def split_note(signed):
    """Return the text of a signed note and the lines of its signatures."""
    text, separator, signatures = signed.partition("\n\n")
    if not separator or not signatures.endswith("\n"):
        raise ValueError("it is not a signed note")
    return text + "\n", signatures[:-1].split("\n")


def key_hash(name, public_key):
    """The first four bytes of what a signed note says of the key that signed it."""
    return hashlib.sha256(name.encode() + b"\n" + KEY_TYPE + public_key).digest()[:4]


class Groups:
    """Holds entries that were signed in groups against each other: their paths lead to one root, that of the group's hashes.

    The signature over the root would say which entry is wrong when they do not. Here those are that contradict
    the hashes, or most of the others.
    """

    def __init__(self, complete):
        self.complete = complete  # no entry is left out, so that every group is seen whole
        self.begun = 0            # the first sequence that was seen
        self.entries = {}         # (hash, group, root) by sequence, from the first group on that was not judged
        self.waiting = []         # sequences of entries that were not judged
        self.skipped = []         # sequences that no entry has, from and to

    def add(self, sequence, digest, proof):
        n, index, path = proof
        self.begun = self.begun or sequence
        if not self.waiting:
            self.entries = {}
        if n:
            self.entries[sequence] = digest, (sequence - index, n), path_root(digest, n, index, path)
            self.waiting.append(sequence)
        else:
            self.entries[sequence] = digest, None, None
        self.settle(sequence, False)

    def settle(self, newest, final):
        while self.waiting:
            group = self.entries[self.waiting[0]][1]
            if not final and newest < sum(group) - 1:
                return  # the rest is still to come
            self.judge(group)
            self.waiting = [s for s in self.waiting if self.entries[s][1] != group]

    def judge(self, group):
        first, n = group
        seen = {s: e for s, e in self.entries.items() if first <= s < first + n}
        roots = {s: root for s, (_, of, root) in seen.items() if of == group}
        others = [s for s, (_, of, _) in seen.items() if of not in (group, None)]
        true = None
        if len(seen) == n:
            tree = Tree()
            for s in range(first, first + n):
                tree.add(seen[s][0])
            true = tree.root()
        elif self.complete and (first >= self.begun or self.begun == 1) and not any(a < first + n and first <= b for a, b in self.skipped):
            raise Broken(min(roots), "the entry names a group that is not in the log")
        if true in roots.values():  # then those are its entries
            wrong = others + [s for s, root in roots.items() if root != true]
        elif len(others) > len(roots):
            wrong = list(roots)
        else:
            most = max(roots.values(), key=list(roots.values()).count)
            wrong = [s for s, root in roots.items() if root != most]
        if wrong:
            raise Broken(min(wrong), "the signature is not of the group that the entry is in")


class Verifier:
    """Checks entries one after the other, oldest first."""

    def __init__(self, tenant=False, start=0, public_key=None, fingerprint=None, since=None):
        self.one_tenant, self.start, self.fingerprint, self.since = tenant, start, fingerprint, since
        self.public_key = public_key
        self.key_id = key_id(public_key) if public_key else None
        self.chain_id = None
        self.whole = not tenant and start <= 1
        self.sequence, self.hash, self.timestamp = 0, ZERO_HASH, ""
        self.first, self.count = 0, 0
        self.tenants = {}
        self.tree, self.epoch, self.rollbacks = Tree(), 1, []
        self.groups = Groups(not tenant)

    def next(self):
        return self.start if self.sequence == 0 and self.start > 1 else self.sequence + 1

    def known(self):
        """Whether the entry before the next one was seen, or is none."""
        return self.whole or self.sequence > 0

    def add(self, line):
        entry, follows = parse_entry(line), self.next()
        if entry is None:
            raise Broken(follows, "the bytes are not the canonical form of an entry")
        sequence = entry["sequence"]
        digest = entry_hash(entry)
        if digest.hex() != entry["hash"]:
            raise Broken(sequence if self.one_tenant else follows, "the hash is not that of the entry")
        if self.count == 0:
            self.begin(entry)
        jump = self.jump(entry, follows)
        if not is_time(entry["timestamp"]):
            raise Broken(sequence, "the timestamp is malformed")
        if not self.one_tenant and not jump and sequence != follows and self.known():
            raise Broken(follows, "expected here, found %d: an entry is missing, repeated or moved" % sequence)
        if sequence <= self.sequence:
            raise Broken(follows, "expected a later entry, found %d: an entry is repeated or moved" % sequence)
        if not self.one_tenant and self.known() and entry["previous_hash"] != self.hash:
            raise Broken(sequence, "the previous hash is not that of the entry before")
        if entry["timestamp"] < self.timestamp:  # of one length, so that they compare as times do
            raise Broken(sequence, "the timestamp is earlier than that of the entry before")
        if entry["key_id"] != self.key_id:
            raise Broken(sequence, "the entry names another signing key than the chain")
        self.link_tenant(entry)
        if jump:
            self.groups.skipped.append((self.sequence + 1, sequence - 1))
            self.enter(entry)
        self.sequence, self.hash, self.timestamp = sequence, entry["hash"], entry["timestamp"]
        self.count += 1
        self.first = self.first or sequence
        self.tree.add(digest)
        if self.since and self.whole and self.tree.size == self.since.size and self.since.head() != self.head():
            raise Broken(self.since.sequence, "the log is not the one that the older checkpoint is of: "
                         "it was written anew at this entry or before")
        proof = parse_signature(entry["signature"])
        if proof is None:
            raise Broken(sequence, "the signature is malformed")
        self.groups.add(sequence, digest, proof)

    def head(self):
        return self.chain_id, self.epoch, self.tree.size, self.tree.root(), self.sequence, self.hash

    def begin(self, entry):
        """Take chain id and key from the first entry."""
        if self.start > 1:
            if not self.one_tenant and entry["sequence"] != self.start:
                jump = self.jump(entry, self.start)
                lost_from = decimal(entry["attributes"].get("lost_from"))
                if not jump or lost_from > self.start or entry["sequence"] < self.start:
                    raise Broken(self.start, "expected here, found %d: an entry is missing, repeated or moved" % entry["sequence"])
            if self.key_id is None:
                self.key_id = entry["key_id"]  # which nobody has vouched for
            return
        attributes = entry["attributes"]
        key = strict_base64(attributes.get("public_key", ""))
        begins = self.one_tenant or entry["event_type"] == "CHAIN_STARTED" and entry["tenant_id"] == "system"
        if not begins or not attributes.get("chain_id") or key is None or len(key) != PUBLIC_KEY_SIZE:
            raise Broken(entry["sequence"] if self.one_tenant else 1,
                         "the first entry does not name a chain id and a public key: the beginning of the log is missing")
        given, self.chain_id, self.public_key, self.key_id = self.public_key, attributes["chain_id"], key, key_id(key)
        self.hold(entry["sequence"], given)
        if self.since and self.whole and self.since.chain_id != self.chain_id:
            raise Unusable("the older checkpoint is of another log")

    def hold(self, sequence, given):
        """Compare chain and key with what was pinned."""
        if self.fingerprint and self.fingerprint != self.chain_fingerprint():
            raise Broken(sequence, "the chain's fingerprint is not the pinned one: this is another log")
        if given and given != self.public_key:
            raise Broken(sequence, "the chain's public key is not the given one: this is another log")

    def chain_fingerprint(self):
        if self.chain_id is None or self.public_key is None:
            return None
        return hashlib.sha3_256(frame("latticekeep/chain/v1", self.chain_id.encode(), self.public_key)).hexdigest()

    def jump(self, entry, follows):
        """Whether the entry begins an epoch, which lets it leave out the sequences that it says were lost."""
        if entry["event_type"] != "ROLLBACK_ACCEPTED" or entry["outcome"] != "success" or self.one_tenant:
            return False
        number, lost_from, lost_to = (decimal(entry["attributes"].get(name)) for name in ("epoch", "lost_from", "lost_to"))
        sequence = entry["sequence"]
        if None in (number, lost_from, lost_to) or lost_to + 1 != sequence or lost_from > sequence:
            raise Broken(follows if self.known() else sequence, "the entry accepts a rollback, and does not say of which entries")
        if not self.known():
            return True
        if lost_from != follows:
            raise Broken(follows, "expected here, found %d: it accepts that entries were lost, but not this one" % sequence)
        if self.whole and (number <= self.epoch or entry["tenant_id"] != "system"):
            raise Broken(follows, "the entry accepts a rollback into an epoch that was before")
        return True

    def enter(self, entry):
        number, lost_from = decimal(entry["attributes"]["epoch"]), decimal(entry["attributes"]["lost_from"])
        if self.since and self.whole and self.since.size > self.tree.size and self.since.epoch < number:
            raise Broken(lost_from, "the older checkpoint knows entries that were lost by the rollback that entry %d accepted" % entry["sequence"])
        self.epoch = number
        self.rollbacks.append((lost_from, entry["sequence"] - 1, number, entry["sequence"]))

    def link_tenant(self, entry):
        tenant, sequence = entry["tenant_id"], entry["sequence"]
        last = self.tenants.get(tenant)
        if last is None:
            if self.one_tenant and self.tenants:
                raise Broken(sequence, "the entry belongs to another tenant")
            last = (0, ZERO_HASH)
            if not self.whole and not self.one_tenant or self.one_tenant and self.start > 1:
                # What this tenant did before the range is not known.
                last = (entry["tenant_sequence"] - 1, entry["tenant_previous_hash"])
        if entry["tenant_sequence"] != last[0] + 1 or entry["tenant_sequence"] == 0:
            raise Broken(sequence, "the tenant's sequence is %d, expected %d: an entry of this tenant is missing, "
                         "repeated or moved" % (entry["tenant_sequence"], last[0] + 1))
        if entry["tenant_previous_hash"] != last[1]:
            raise Broken(sequence, "the previous hash is not that of the tenant's entry before")
        self.tenants[tenant] = (entry["tenant_sequence"], entry["hash"])

    def finish(self):
        if self.count == 0:
            raise Broken(self.next(), "there is no entry")
        if self.since and self.whole and self.since.size > self.tree.size:
            raise Broken(self.next(), "the log was cut: the older checkpoint knows entries up to %d" % self.since.sequence)

    def close(self, line):
        """Hold the closing line against the entries."""
        after = self.next()
        try:
            text = line.decode("utf-8")
            end = json.loads(text)
            if set(end) != {"checkpoint"} or canonical(end) != text:
                raise ValueError("another form")
            text, signatures = split_note(end["checkpoint"])
            checkpoint = Checkpoint(text)
            if len(signatures) != 1:
                raise ValueError("other signatures")
            name, signature = re.fullmatch("\u2014 ([^ ]+) ([^ ]+)", signatures[0]).groups()
            data = strict_base64(signature)
            if data is None:
                raise ValueError("no base64")
        except (ValueError, TypeError, AttributeError):
            raise Broken(after, "the closing line is malformed") from None
        signed = name == checkpoint.origin() and len(data) == 4 + SIGNATURE_SIZE
        if self.public_key and signed:
            signed = data[:4] == key_hash(name, self.public_key)
        if not signed or self.chain_id is not None and checkpoint.chain_id != self.chain_id:
            raise Broken(after, "the closing line does not verify")
        if self.one_tenant:
            if checkpoint.sequence < self.sequence:
                raise Broken(after, "the export goes on after its end: it says that it ends at %d" % checkpoint.sequence)
            return
        if checkpoint.sequence != self.sequence or checkpoint.hash != self.hash:
            raise Broken(after, "the export was cut: it says that it ends at %d" % checkpoint.sequence)
        if checkpoint.time != self.timestamp or self.whole and checkpoint.head() != self.head():
            raise Broken(self.sequence, "the closing checkpoint has another tree or time than the entries")
        if not self.whole:
            self.chain_id = checkpoint.chain_id
            if self.public_key:
                self.hold(self.first, None)


def key_id(public_key):
    return hashlib.sha3_256(frame("ML-DSA-65", public_key)).hexdigest()


def lines_of(stream):
    """Lines that end in one newline, without it; a carriage return is part of one."""
    for line in stream:
        yield line[:-1] if line.endswith(b"\n") else line


def of_tenant(line):
    """Whether an export that begins with the line is that of one tenant."""
    entry = parse_entry(line)
    if entry is None or entry["sequence"] <= 1 or entry["tenant_sequence"] != 1 or not entry["attributes"].get("chain_id"):
        return False
    key = strict_base64(entry["attributes"].get("public_key", ""))
    return key is not None and len(key) == PUBLIC_KEY_SIZE


def verify(stream, tenant, start, public_key, fingerprint, since):
    verifier, end = None, None
    for line in lines_of(stream):
        if verifier is None:
            tenant = tenant or start <= 1 and of_tenant(line)
            if tenant and since:
                raise Unusable("the export of a tenant does not show what an older checkpoint knows: verify the whole log")
            verifier = Verifier(tenant, start, public_key, fingerprint, since)
        if end is not None:
            raise Broken(verifier.next(), "the export goes on after its closing line")
        if line.startswith(b'{"checkpoint":'):
            end = line
            continue
        if line.startswith(b'{"end":'):
            raise Unusable("the export was made by an earlier release, which closed it in another way: export the log again")
        if start > 1:
            entry = parse_entry(line)
            if entry and entry["sequence"] < start:
                continue
        verifier.add(line)
    verifier = verifier or Verifier(tenant, start, public_key, fingerprint, since)
    verifier.finish()
    if end is not None:
        verifier.close(end)
    else:
        raise Broken(verifier.next(), "the export was cut: its closing line is missing")
    verifier.groups.settle(verifier.sequence, True)
    return verifier


def read_pem(path):
    """The key of a PEM file: it ends the SubjectPublicKeyInfo."""
    with open(path, encoding="ascii") as f:
        body = "".join(l.strip() for l in f if not l.startswith("-----"))
    der = base64.b64decode(body, validate=True)
    if len(der) != 22 + PUBLIC_KEY_SIZE:
        raise ValueError("it is not an ML-DSA-65 public key")
    return der[22:]


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n", 1)[1],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="export of latticekeep audit export; - is standard input")
    parser.add_argument("--fingerprint", help="fingerprint that the chain must have")
    parser.add_argument("--public-key", metavar="PEM", help="public key that the log must have")
    parser.add_argument("--since", metavar="NOTE", help="file with an older checkpoint that the log must go on from; its signature is not checked")
    parser.add_argument("--from", dest="start", type=int, default=0, metavar="N", help="verify from this sequence on")
    parser.add_argument("--tenant", action="store_true", help="it is the export of one tenant, as that of system; others are recognised")
    o = parser.parse_args(argv)
    if o.fingerprint == "":
        parser.error("--fingerprint is empty: give it a value, or leave it out")
    if o.since and o.start > 1:
        parser.error("--since needs the whole log: leave --from out")
    try:
        public_key = read_pem(o.public_key) if o.public_key else None
        since = None
        if o.since:
            with open(o.since, encoding="utf-8", newline="") as f:
                since = Checkpoint(split_note(f.read())[0])
        if o.file == "-":
            v = verify(sys.stdin.buffer, o.tenant, o.start, public_key, o.fingerprint, since)
        else:
            with open(o.file, "rb") as f:
                v = verify(f, o.tenant, o.start, public_key, o.fingerprint, since)
    except Broken as broken:
        print(broken, file=sys.stderr)
        return 1
    except (Unusable, OSError, ValueError) as err:
        print("it could not be verified: %s" % err, file=sys.stderr)
        return 2
    what = "the whole log" if v.whole else "the log of tenant " + next(iter(v.tenants)) if v.one_tenant else "a part of the log"
    print("ok: %s: %d entries, %d to %d" % (what, v.count, v.first, v.sequence))
    print("head: %d %s" % (v.sequence, v.hash))
    if v.whole:
        print("tree: %d entries, root %s, epoch %d" % (v.tree.size, base64.b64encode(v.tree.root()).decode(), v.epoch))
    for lost_from, lost_to, epoch, sequence in v.rollbacks:
        print("rollback: entry %d accepts that entries %d to %d were lost, and begins epoch %d" % (sequence, lost_from, lost_to, epoch))
    if v.since:
        print("since: the log holds all that the checkpoint of entry %d knows (%d entries)" % (v.since.sequence, v.since.size))
    if v.chain_fingerprint():
        print("chain: %s (%s)" % (v.chain_fingerprint(), "the pinned one" if o.fingerprint or o.public_key else "self-consistent only"))
    print("not checked: ML-DSA-65 signatures, of entries and of checkpoints")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
