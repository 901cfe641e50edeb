"""What the scripts beside this one share: a `nuthatch serve` of one's own, and checks that are counted."""

import http.client
import json
import re
import subprocess
import threading

CHECKS = 0


def check(is_fine, what):
    global CHECKS
    CHECKS += 1
    if not is_fine:
        raise AssertionError(what)


def n_checks():
    return CHECKS


class Serve:
    """`nuthatch serve` with these words on a free port, until `end` or the end of a block.

    What the server says at its start beside its address can be asked for by patterns: `said` has what
    their groups found.
    """

    def __init__(self, binary, *words, patterns=()):
        self.command = [str(binary), "serve", "--port", "0", *map(str, words)]
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True)
        self.url = self.find(r"served at (https?://[^,\s]+)").group(1)
        host, port = self.url.split("://")[1].rsplit(":", 1)
        self.place = (host, int(port))
        self.said = [self.find(pattern).groups() for pattern in patterns]
        # What it says later must not fill the pipe.
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def find(self, pattern):
        lines = []
        for line in self.process.stderr:
            found = re.search(pattern, line)
            if found:
                return found
            lines.append(line)
        raise RuntimeError(f"{' '.join(self.command)}: {''.join(lines)}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(timeout=120)

    def end(self):
        self.process.terminate()
        check(self.process.wait(timeout=120) == 0, "the server did not end well")

    def post(self, path, body, timeout=600):
        """An open answer to a request, whose lines can be read as they come."""
        connection = http.client.HTTPConnection(*self.place, timeout=timeout)
        connection.request("POST", path, json.dumps(body))
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.read()}")
        return answer

    def ask(self, path, body):
        return json.load(self.post(path, body))

    def metrics(self):
        """The server's own counters: name, or name:label, to number."""
        connection = http.client.HTTPConnection(*self.place, timeout=60)
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
        connection.close()
        found = {}
        for line in page.splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith("nuthatch:"):
                label = re.search(r'(?:end|reason|heads|kind|part|cause|way)="([^"]*)"', name)
                found[name.partition("{")[0] + (f":{label.group(1)}" if label else "")] = float(value)
        return found
