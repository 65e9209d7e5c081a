"""A network link that can be cut: a TCP forwarder on loopback between one site and the server."""

import contextlib
import select
import socket
import threading


class Cable:
    """Forwards connections on `port` to the server's port, except between `cut` and `mend`."""

    def __init__(self, server: int) -> None:
        self._server = ("127.0.0.1", server)
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self._whole, self._closed = threading.Event(), False
        self._whole.set()
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        """End all connections and drop new ones."""
        self._whole.clear()

    def mend(self) -> None:
        """Forward new connections again."""
        self._whole.set()

    def close(self) -> None:
        """Stop forwarding for ever."""
        self._closed = True
        self.cut()
        self._door.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closed:
                site, _ = self._door.accept()
                threading.Thread(target=self._forward, args=(site,), daemon=True).start()

    def _forward(self, site: socket.socket) -> None:
        with site, contextlib.suppress(OSError), socket.create_connection(self._server) as server:
            pairs = {site: server, server: site}
            while self._whole.is_set():
                for end in select.select(list(pairs), [], [], 0.2)[0]:
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    pairs[end].sendall(data)
