"""The control socket: access, the handshake of engines, their epochs, and questions and commands of users."""
