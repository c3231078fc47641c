"""Messages between two processes of a server: channel, codec, tensors, blocks, logs; the loop of sockets."""
