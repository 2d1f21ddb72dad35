-- Deletes the hash of one record if `writer` wrote it.
--
-- KEYS  1 hash of the record  2 members of the fleet
-- ARGV  1 member  2 writer
-- Returns 1 if deleted, 0 if another's is there, or nothing.
if redis.call('HGET', KEYS[1], '_writer') ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
