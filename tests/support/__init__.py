"""What tests share: the auditor, daemons, engines."""
