"""The control socket: who may connect, the handshake of engines, and questions and commands of operators."""
