-- Writes or renews the hash of one record, unless a newer owner's is there.
--
-- A record carries (_scope, _rank): within a scope the higher rank wins. Another scope (the
-- usage of another boot of the worker) wins only if the worker's own hash, KEYS[3], names it;
-- while the worker has none, the first to come keeps the key until its lease ends.
--
-- KEYS  1 hash of the record  2 members of the fleet  3 (usage only) hash of the worker
-- ARGV  1 member  2 lease in ms  3 sweep members silent for so many ms
--       4 writer  5 scope  6 rank  7... fields and values; none = renew the lease only
-- Returns 1 held, 0 refused, -1 not ours to renew (write it whole).
local writer, scope, rank = ARGV[4], ARGV[5], ARGV[6]

local function outranks_us(other_scope, other_rank)
  if not other_scope then return false end
  return other_scope ~= scope or tonumber(other_rank or 0) > tonumber(rank)
end

local stored = redis.call('HMGET', KEYS[1], '_writer', '_scope', '_rank')
local is_ours = stored[1] == writer and stored[2] == scope and stored[3] == rank
-- A full server refuses the first write that needs memory. PEXPIRE needs none, and a script that
-- has written may go on: records that are there keep their leases and even change.
if is_ours then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end

if #ARGV == 6 then
  if not is_ours then return -1 end
else
  local worker = { false, false }
  if KEYS[3] then worker = redis.call('HMGET', KEYS[3], 'boot_id', 'epoch') end
  if outranks_us(worker[1], worker[2]) then return 0 end
  if stored[2] == scope or not worker[1] then
    if outranks_us(stored[2], stored[3]) then return 0 end
  end
  redis.call('HSET', KEYS[1], '_writer', writer, '_scope', scope, '_rank', rank, unpack(ARGV, 7))
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[3])
return 1
