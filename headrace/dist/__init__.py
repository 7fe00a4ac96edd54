"""How the core reaches its ranks. Only starts workers and carries plans; it never schedules."""
