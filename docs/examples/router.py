"""A router for the vLLM engines of one node that announces each prompt before its request.

    python router.py PORT DOOR_SOCKET ENGINE_ID=URL ENGINE_ID=URL

A request goes to the engine that got the longest part of its prompt before.  Each engine gets one request at a time, so
what waits here is being fetched meanwhile.  The engine's answer is passed on byte by byte: errors, and streams as they
come.  A client that leaves ends its request in the engine.  A request that an engine did not begin to answer is sent
once more, to another engine where there is one.
"""

import contextlib
import http.client
import http.server
import json
import select
import socket
import sys
import threading
import time
import urllib.parse
import uuid
from typing import Any

BLOCK = 64  # tokens of the parts that are compared
KNOWN = 100_000  # parts that are remembered of an engine
PLACE_S, ANSWER_S = 300.0, 120.0  # longest waits for an engine's place, and for the next bytes of its answer
DOOR_S = 10.0  # longest wait for the door, on a thread; its first connection starts it
LOOK_S = 0.2  # between looks whether the client is still there
NOT_PASSED_ON = {"connection", "content-length", "host", "keep-alive", "transfer-encoding", "upgrade"}


CHOICE = threading.Lock()


class Gone(Exception):
    """The client left."""


class Engine:
    def __init__(self, name: str, url: str) -> None:
        self.name, self.place, self.waiting = name, threading.Lock(), 0
        self.host = urllib.parse.urlsplit(url).netloc
        self.known: dict[int, None] = {}

    def length(self, parts: list[int]) -> int:
        """Return how many leading parts of a prompt it got before."""
        return next((at for at, part in enumerate(parts) if part not in self.known), len(parts))

    def learn(self, parts: list[int]) -> None:
        if len(self.known) > KNOWN:
            self.known.clear()
        self.known |= dict.fromkeys(parts)

    def announce(self, tokens: list[int]) -> None:
        """Tell the daemon. A failure is no loss: no request needs its announcement."""
        payload = {"engine": self.name, "token_ids": tokens}
        action = {"action_id": "1", "action_type": "kv.prefetch", "action_version": "1.0", "payload": payload}
        envelope = {"protocol_version": "0.1", "message_id": uuid.uuid4().hex, "actions": [action]}
        door = http.client.HTTPConnection("door")
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(door):
            door.sock = socket.socket(socket.AF_UNIX)
            door.sock.settimeout(DOOR_S)
            door.sock.connect(DOOR)
            door.request("POST", "/v1/kv_hints", json.dumps(envelope))
            door.getresponse().read()

    def tokens(self, body: dict[str, Any]) -> list[int]:
        """Return the prompt's tokens: vLLM's /tokenize says them as it will use them. [] where it does not."""
        prompt = body.get("prompt")
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return prompt
        named = ("model", "prompt", "messages", "tools", "chat_template_kwargs")
        question = json.dumps({name: body[name] for name in named if name in body})
        engine = http.client.HTTPConnection(self.host, timeout=1)
        failures = (OSError, ValueError, LookupError, http.client.HTTPException)
        with contextlib.suppress(*failures), contextlib.closing(engine):
            engine.request("POST", "/tokenize", question, {"Content-Type": "application/json"})
            return list(json.loads(engine.getresponse().read())["tokens"])
        return []


class Router(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = ANSWER_S  # of the client, too

    def do_POST(self) -> None:
        self.close_connection = True
        try:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = json.loads(body)
            if not isinstance(request, dict):
                raise ValueError("the body is no object")
        except (TypeError, ValueError) as error:
            return self.fail(400, f"the router needs a JSON object with Content-Length: {error}")
        tokens = min(ENGINES, key=lambda each: each.waiting).tokens(request)
        parts: list[int] = []
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            parts.append(hash((*parts[-1:], *tokens[end - BLOCK : end])))
        left = list(ENGINES)
        with contextlib.suppress(Gone, BrokenPipeError, ConnectionResetError):
            for last in (False, True):
                with CHOICE:
                    engine = max(left, key=lambda each: (each.length(parts), -each.waiting))
                    engine.learn(parts)
                    engine.waiting += 1
                left = [each for each in left if each is not engine] or left
                if tokens:
                    threading.Thread(target=engine.announce, args=(tokens,), daemon=True).start()
                try:
                    if self.forward(engine, body, last=last):
                        break
                finally:
                    with CHOICE:
                        engine.waiting -= 1
        return None

    def forward(self, engine: Engine, body: bytes, *, last: bool) -> bool:
        """Pass the request on, and the answer back. False: the engine said nothing, and another may. Raises Gone."""
        if not self.got_place(engine):
            self.fail(503, f"engine {engine.name} has no place: waited {PLACE_S:.0f} s")
            return True
        headers = {name: text for name, text in self.headers.items() if name.lower() not in NOT_PASSED_ON}
        answered, why = False, "it hung up"
        with contextlib.closing(http.client.HTTPConnection(engine.host, timeout=ANSWER_S)) as connection:
            try:
                connection.request("POST", self.path, body, {**headers, "Connection": "close"})
                answered = self.relay(connection.sock)
            except TimeoutError:
                self.fail(504, f"engine {engine.name} says nothing: waited {ANSWER_S:.0f} s")
                return True
            except OSError as error:
                why = str(error)
            finally:
                engine.place.release()
        if last and not answered:
            self.fail(502, f"engine {engine.name} does not answer: {why}")
        return answered

    def got_place(self, engine: Engine) -> bool:
        """Wait for the engine's place. Raises Gone."""
        until = time.monotonic() + PLACE_S
        while not engine.place.acquire(timeout=LOOK_S):
            if self.left():
                raise Gone
            if time.monotonic() > until:
                return False
        return True

    def relay(self, engine: socket.socket) -> bool:
        """Pass the answer's bytes on as they come; False if there were none. Raises Gone and TimeoutError."""
        until, answered = time.monotonic() + ANSWER_S, False
        while time.monotonic() < until:
            if select.select([engine], [], [], LOOK_S)[0]:
                data = b""
                with contextlib.suppress(OSError):  # it broke: a client with a part of the answer misses its end
                    data = engine.recv(1 << 16)
                if not data:
                    return answered
                try:
                    self.connection.sendall(data)
                except OSError:
                    raise Gone from None
                until, answered = time.monotonic() + ANSWER_S, True
            elif self.left():
                raise Gone  # its caller closes the connection, and vLLM aborts the request
        if answered:
            return True
        raise TimeoutError

    def left(self) -> bool:
        """Whether the client hung up."""
        try:
            return bool(select.select([self.connection], [], [], 0)[0]) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def fail(self, status: int, message: str) -> None:
        text = json.dumps({"error": {"message": message, "type": "router", "code": status}}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128


if __name__ == "__main__":
    DOOR = sys.argv[2]
    ENGINES = [Engine(*each.split("=", 1)) for each in sys.argv[3:]]
    Server(("127.0.0.1", int(sys.argv[1])), Router).serve_forever()
