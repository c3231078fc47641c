"""The server's side of one worker: socket, requests in flight, responses, and its calls to the server."""
