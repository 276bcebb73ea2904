"""A router for the vLLM engines of one node that announces each prompt before its request.

    python router.py PORT DOOR_SOCKET ENGINE_ID=URL ENGINE_ID=URL

It takes completions whose prompt is a list of token ids.  A request goes to the engine that got the longest part of its
prompt before.  Each engine gets one request at a time, so what waits here is being fetched meanwhile.
"""

import http.client
import http.server
import json
import socket
import sys
import threading
import urllib.request
import uuid

BLOCK = 64  # tokens of the parts that are compared


class Engine:
    def __init__(self, name: str, url: str) -> None:
        self.name, self.url, self.place, self.waiting = name, url, threading.Lock(), 0
        self.known: set[int] = set()

    def length(self, prompt: list[int]) -> int:
        ends = range(BLOCK, len(prompt) + 1, BLOCK)
        return next((at for at, end in enumerate(ends) if hash((*prompt[:end],)) not in self.known), len(ends))

    def announce(self, prompt: list[int]) -> None:
        payload = {"engine": self.name, "token_ids": prompt}
        action = {"action_id": "1", "action_type": "kv.prefetch", "action_version": "1.0", "payload": payload}
        envelope = {"protocol_version": "0.1", "message_id": uuid.uuid4().hex, "actions": [action]}
        door = http.client.HTTPConnection("door", timeout=1)
        try:
            door.sock = socket.socket(socket.AF_UNIX)
            door.sock.connect(DOOR)
            door.request("POST", "/v1/kv_hints", json.dumps(envelope))
            door.getresponse().read()
        except (OSError, http.client.HTTPException):
            pass  # no request needs its announcement
        finally:
            door.close()


class Router(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        prompt = json.loads(body)["prompt"]
        engine = max(ENGINES, key=lambda each: (each.length(prompt), -each.waiting))
        engine.known |= {hash((*prompt[:end],)) for end in range(BLOCK, len(prompt) + 1, BLOCK)}
        engine.waiting += 1
        engine.announce(prompt)
        try:
            with engine.place:
                request = urllib.request.Request(engine.url + self.path, body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request) as response:
                    answer = response.read()
        finally:
            engine.waiting -= 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


if __name__ == "__main__":
    DOOR = sys.argv[2]
    ENGINES = [Engine(*each.split("=", 1)) for each in sys.argv[3:]]
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Router).serve_forever()
