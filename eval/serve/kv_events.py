"""KV events of `nuthatch serve`, read by ZeroMQ's and MessagePack's own libraries.

    python eval/serve/kv_events.py target/release/nuthatch

For each encoding it starts a server with few pages on two tiers, follows the events while requests come
and pages are evicted, and holds the page tables that it built against what the server says it has:
after a load, after a gap that it makes by throwing batches away and heals by replay, as somebody who
comes late and takes a snapshot, and after everything is forgotten. `cargo xtask clients` makes the
environment.
"""

import json
import pathlib
import sys
import time
import urllib.error
import urllib.request

import msgpack
import zmq

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from server import Serve, check, n_checks  # noqa: E402

PAGE_BYTES = 368_640  # of the default model: 30 layers, 3 KV heads, 64 wide, 16 tokens, f16
TOPIC = "kv@here@small"


class Server(Serve):
    def __init__(self, binary, encoding, **more):
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": TOPIC,
                  "endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0",
                  "encoding": encoding, **more}
        super().__init__(binary, "--admin-key", "admin", "-c", "512",
                         "--kv-cache-memory-bytes", 64 * PAGE_BYTES,
                         "--swap-space", f"{24 * PAGE_BYTES}B",
                         "--kv-events-config", json.dumps(config),
                         patterns=[r"published at (tcp://[^,\s]+), replayed at (tcp://[^,\s]+)"])
        [(self.live, self.desk)] = self.said

    def ask(self, path, body=None, method=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, method=method)
        request.add_header("Authorization", "Bearer admin")
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    def complete(self, tokens, **more):
        body = {"prompt": tokens, "max_tokens": 1, "temperature": 0, **more}
        return self.ask("/v1/completions", body)

    def blocks(self):
        """What the server says it has: (hash, medium) -> hash of the page before."""
        listed = self.ask("/kv_cache_blocks")
        check(listed["block_size"] == 16, listed["block_size"])
        return {(b["block_hash"], b["medium"]): b["parent_block_hash"] for b in listed["blocks"]}


class Reader:
    """Rebuilds the page tables from events alone."""

    def __init__(self, server, encoding, sub=None):
        self.encoding = encoding
        self.sub = sub or zmq.Context.instance().socket(zmq.SUB)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, "kv@")
        if not sub:
            self.sub.connect(server.live)
        self.desk = server.desk
        self.last = -1
        self.blocks = {}
        self.tokens = {}
        self.n_events = {"BlockStored": 0, "BlockRemoved": 0, "AllBlocksCleared": 0}
        self.n_empty = self.n_replayed = 0

    def event(self, raw):
        """An event as a dictionary, whichever encoding it came in."""
        if self.encoding == "map":
            check(isinstance(raw, dict), raw)
            return raw
        check(isinstance(raw, list), raw)
        names = {"BlockStored": ["block_hashes", "parent_block_hash", "token_ids", "block_size",
                                 "lora_id", "medium", "lora_name", "extra_keys"],
                 "BlockRemoved": ["block_hashes", "medium"], "AllBlocksCleared": []}[raw[0]]
        return {"type": raw[0], **dict(zip(names, raw[1:]))}

    def apply(self, payload):
        stamp, events, rank = msgpack.unpackb(payload)
        check(abs(stamp - time.time()) < 600 and rank == 0, (stamp, rank))
        self.n_empty += not events
        for raw in events:
            event = self.event(raw)
            self.n_events[event["type"]] += 1
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
                continue
            hashes, medium = event["block_hashes"], event["medium"]
            check(medium in ("GPU", "CPU"), event)
            if event["type"] == "BlockRemoved":
                for h in hashes:
                    check((h, medium) in self.blocks, f"{h} was removed and never stored")
                    del self.blocks[h, medium]
                continue
            check(event["block_size"] == 16 and len(event["token_ids"]) == 16 * len(hashes), event)
            parent = event["parent_block_hash"]
            for i, h in enumerate(hashes):
                self.blocks[h, medium] = parent
                self.tokens[h] = event["token_ids"][16 * i:16 * i + 16]
                parent = h

    def take(self, seq, payload):
        """Takes a batch in; replay brings what is missing before it."""
        if seq <= self.last:
            return
        if seq > self.last + 1:
            self.replay()
        if seq > self.last:
            check(seq == self.last + 1, f"{seq} after {self.last}, and replay did not help")
            self.apply(payload)
            self.last = seq

    def replay(self):
        desk = zmq.Context.instance().socket(zmq.DEALER)
        desk.connect(self.desk)
        desk.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
        while True:
            check(desk.poll(10_000), "no replay came")
            empty, topic, seq, payload = desk.recv_multipart()
            check(empty == b"", empty)
            if not payload:
                check(int.from_bytes(seq, "big", signed=True) == -1 and topic == b"", seq)
                break
            check(topic == TOPIC.encode(), topic)
            seq = int.from_bytes(seq, "big")
            check(seq == self.last + 1, f"{seq} after {self.last} in a replay")
            self.apply(payload)
            self.last = seq
            self.n_replayed += 1
        desk.close()

    def snapshot(self):
        desk = zmq.Context.instance().socket(zmq.REQ)
        desk.connect(self.desk)
        desk.send(b"snapshot")
        check(desk.poll(10_000), "no snapshot came")
        _, seq, payload = desk.recv_multipart()
        self.last = int.from_bytes(seq, "big", signed=True)
        check(self.last >= 0, self.last)
        self.blocks = {}
        self.apply(payload)
        desk.close()

    def listen(self, drop=lambda seq: False):
        """Takes in all that comes, and then the next heartbeat, which shows what is missing."""
        while self.sub.poll(300):
            self.receive(drop)
        n_empty, end = self.n_empty, time.time() + 30
        while self.n_empty == n_empty:
            check(time.time() < end, "no heartbeat came")
            if self.sub.poll(3000):
                self.receive(drop)

    def receive(self, drop):
        topic, seq, payload = self.sub.recv_multipart()
        check(topic == TOPIC.encode() and len(seq) == 8, (topic, seq))
        seq = int.from_bytes(seq, "big")
        if not drop(seq):
            self.take(seq, payload)


def load(server, n, salt=None, start=100):
    """Requests with a common beginning of two pages, of six pages each."""
    more = {"cache_salt": salt} if salt else {}
    for i in range(n):
        head = list(range(start, start + 32))
        tail = [1000 + 64 * (start + i) + j for j in range(64)]
        server.complete([token % 40_000 + 10 for token in head + tail] + [7], **more)


def equal(reader, server, what):
    listed = server.blocks()
    check(listed, f"{what}: the server has nothing")
    check(reader.blocks == listed, f"{what}: {len(reader.blocks)} pages, the server has {len(listed)}")
    known = {h for h, _ in listed}
    parents = {parent for parent in listed.values() if parent is not None}
    check(parents <= known, f"{what}: a page without the one before it")
    print(f"{reader.encoding}, {what}: {len(listed)} pages,", reader.n_events)


def run(binary, encoding):
    server = Server(binary, encoding)
    try:
        reader = Reader(server, encoding)
        time.sleep(0.5)
        reader.listen()
        load(server, 4)
        reader.listen()
        equal(reader, server, "a load")
        first = list(range(110, 126))
        check(any(tokens == first for tokens in reader.tokens.values()), "the tokens of a page")

        load(server, 4, salt="secret", start=300)
        load(server, 20, start=500)
        reader.listen()
        equal(reader, server, "evictions")
        check(reader.n_events["BlockRemoved"] > 0, "nothing was evicted")
        check(any(medium == "CPU" for _, medium in reader.blocks), "nothing went to the host")

        # Half of the batches are lost on the way; the heartbeat shows it, and replay heals it.
        load(server, 6, start=2000)
        reader.listen(drop=lambda seq: seq % 2 == 0)
        equal(reader, server, "a gap")
        check(reader.n_replayed > 0, "nothing was replayed")

        late = Reader(server, encoding)
        late.snapshot()
        equal(late, server, "a snapshot")
        load(server, 3, start=3000)
        late.listen()
        reader.listen()
        equal(late, server, "after a snapshot")
        equal(reader, server, "all along")

        freed = server.ask("/reset_prefix_cache", method="POST")["pages_freed"]
        check(freed > 0, "nothing was freed")
        reader.listen()
        check(server.blocks() == {} and reader.blocks == {}, "something is left")
        check(reader.n_events["AllBlocksCleared"] == 1, reader.n_events)
        load(server, 1)
        reader.listen()
        equal(reader, server, "anew")
    finally:
        server.end()


def forgotten(binary):
    """Replay that begins too late: only a snapshot helps."""
    server = Server(binary, "map", buffer_steps=2)
    try:
        reader = Reader(server, "map")
        time.sleep(0.5)
        load(server, 5)
        seen = []
        while reader.sub.poll(500):
            _, seq, _ = reader.sub.recv_multipart()
            seen.append(int.from_bytes(seq, "big"))
        check(seen == sorted(seen) and len(seen) > 2, seen)
        desk = zmq.Context.instance().socket(zmq.DEALER)
        desk.connect(server.desk)
        for wrong in ([b"", b"123"], [b"x"], [b"a", b"b", b"c"]):
            desk.send_multipart(wrong)
        desk.send_multipart([b"", (0).to_bytes(8, "big")])
        replayed = []
        while True:
            check(desk.poll(10_000), "no replay came")
            _, _, seq, payload = desk.recv_multipart()
            if not payload:
                break
            replayed.append(int.from_bytes(seq, "big"))
        check(len(replayed) == 2, replayed)
        reader.snapshot()
        equal(reader, server, "a snapshot instead of a replay")
    finally:
        server.end()


def called(binary):
    """A subscriber that listens, to which the server goes."""
    sub = zmq.Context.instance().socket(zmq.SUB)
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    server = Server(binary, "array", endpoint=f"tcp://localhost:{port}")
    try:
        reader = Reader(server, "array", sub)
        reader.listen()
        load(server, 3)
        reader.listen()
        equal(reader, server, "called by the server")
    finally:
        server.end()


def main():
    for encoding in ("map", "array"):
        run(sys.argv[1], encoding)
    forgotten(sys.argv[1])
    called(sys.argv[1])
    print(f"{n_checks()} checks with pyzmq {zmq.__version__} and msgpack "
          f"{'.'.join(map(str, msgpack.version))}: all fine")


if __name__ == "__main__":
    main()
