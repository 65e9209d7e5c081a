"""A network link that can be cut: a TCP forwarder on loopback between one site and the server."""

import contextlib
import select
import socket
import threading
import time


class Cable:
    """Forwards connections on `port` to the server's port, except while it is cut."""

    def __init__(self, server: int) -> None:
        self._server = ("127.0.0.1", server)
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self._whole = True
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self, seconds: float) -> None:
        """End all connections and drop new ones for so long."""
        self._whole = False
        time.sleep(seconds)
        self._whole = True

    def close(self) -> None:
        """Stop forwarding for ever."""
        self._whole = False
        self._door.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                site, _ = self._door.accept()
                threading.Thread(target=self._forward, args=(site,), daemon=True).start()

    def _forward(self, site: socket.socket) -> None:
        with site, contextlib.suppress(OSError), socket.create_connection(self._server) as server:
            pairs = {site: server, server: site}
            while self._whole:
                for end in select.select(list(pairs), [], [], 0.2)[0]:
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    pairs[end].sendall(data)
