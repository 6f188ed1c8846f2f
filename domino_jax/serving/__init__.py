"""The server: engine thread, protocol, application and page. The command is domino_jax/serve.py."""
